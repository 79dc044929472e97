// Memory over time: a stack of byte classes against the budget.
const GIB = 1024 ** 3;
const MIB = 1024 ** 2;

const mostBytes = Math.max(data.reserved, ...timelines.map(({ memory }) => (memory.peak < 0 ? 0 : memory.totals[memory.peak])));
// A budget far above the need would press the stack flat: then the chart ends above the need, and says so.
const budgetIsFar = data.budget > 2 * mostBytes;
const topBytes = Math.max(1, budgetIsFar ? mostBytes * 1.25 : Math.max(data.budget, mostBytes) * 1.09);

class MemoryPanel extends Panel {
  constructor(canvas, timeline) {
    super(canvas, 260);
    this.timeline = timeline;
    this.keys = {
      ArrowLeft: () => this.moveCursor(-1),
      ArrowRight: () => this.moveCursor(1),
    };
    makeInteractive(this);
  }

  get bottom() {
    return this.height - 24;
  }

  y(bytes) {
    return this.bottom - (bytes / topBytes) * (this.bottom - 8);
  }

  stepAt(time) {
    return clamp(firstAbove(this.timeline.memory.times, time) - 1, 0, this.timeline.memory.times.length - 1);
  }

  draw(pen) {
    this.drawTimeAxis(pen, 8, this.bottom);
    this.drawByteAxis(pen);
    if (this.timeline.memory.times.length) {
      this.clipToPlot(pen, 0, this.bottom, () => this.drawStack(pen));
    }
    this.drawLimits(pen);
    this.drawPeak(pen);
    this.drawCursor(pen, 8, this.bottom);
  }

  drawByteAxis(pen) {
    const unit = topBytes >= GIB ? GIB : MIB;
    const { values, places } = ticks(0, topBytes, unit, 6);
    const text = (value) => `${grouped(value / unit, places)} ${unit === GIB ? "GiB" : "MiB"}`;
    this.drawRows(pen, values, (value) => this.y(value), text);
  }

  // In every column of pixels the step with the most bytes is drawn, so that no peak is lost between two.
  columns() {
    const { times, totals } = this.timeline.memory;
    const scale = window.devicePixelRatio || 1;
    const count = Math.ceil(this.plotWidth * scale);
    const steps = new Int32Array(count).fill(-1);
    const column = (time) => Math.floor(((time - view.from) / (view.to - view.from)) * count);
    for (let step = this.stepAt(view.from); step < times.length && times[step] <= view.to; step += 1) {
      const until = step + 1 < times.length ? times[step + 1] : this.timeline.duration;
      const last = Math.min(count - 1, Math.max(column(times[step]), column(until) - (until > times[step] ? 1 : 0)));
      for (let at = Math.max(0, column(times[step])); at <= last; at += 1) {
        if (steps[at] < 0 || totals[step] > totals[steps[at]]) steps[at] = step;
      }
    }
    return { steps, scale };
  }

  drawStack(pen) {
    const { steps, scale } = this.columns();
    const { tops } = this.timeline.memory;
    for (const layer of [...usedLayers].reverse()) {
      pen.fillStyle = colors.layers[layer];
      pen.beginPath();
      pen.moveTo(margins.left, this.bottom);
      let right = margins.left;
      for (let at = 0; at < steps.length; at += 1) {
        const left = margins.left + at / scale;
        const height = steps[at] < 0 ? this.bottom : this.y(tops[layer][steps[at]]);
        pen.lineTo(left, height);
        right = left + 1 / scale;
        pen.lineTo(right, height);
      }
      pen.lineTo(right, this.bottom);
      pen.fill();
    }
  }

  drawLimits(pen) {
    const right = margins.left + this.plotWidth;
    const line = (bytes, color, dash, width) => {
      const y = Math.round(this.y(bytes)) + 0.5;
      pen.strokeStyle = color;
      pen.lineWidth = width;
      pen.setLineDash(dash);
      drawLine(pen, margins.left, y, right, y);
      pen.setLineDash([]);
      return y;
    };
    const reserved = line(data.reserved, colors.ink, [2, 3], 1);
    // At the other end than the peak, whose label stands at the same height.
    const { memory } = this.timeline;
    const isPeakLeft = memory.peak >= 0 && memory.times[memory.peak] < (view.from + view.to) / 2;
    const [x, align] = isPeakLeft ? [right - 4, "right"] : [margins.left + 6, "left"];
    this.mark(pen, `reserved ${formatBytes(data.reserved)}`, x, reserved + 9, colors.ink, align);
    if (budgetIsFar) {
      this.mark(pen, `budget ${formatBytes(data.budget)}, above this chart`, right - 4, 16, colors.bad, "right");
    } else {
      const budget = line(data.budget, colors.bad, [7, 4], 1.75);
      this.mark(pen, `budget ${formatBytes(data.budget)}`, right - 4, budget - 9, colors.bad, "right");
    }
  }

  drawPeak(pen) {
    const { memory } = this.timeline;
    if (memory.peak < 0) return;
    const time = memory.times[memory.peak];
    if (time < view.from || time > view.to) return;
    const x = this.x(time);
    const y = this.y(memory.totals[memory.peak]);
    pen.fillStyle = colors.card;
    pen.strokeStyle = colors.ink;
    pen.lineWidth = 1.75;
    pen.beginPath();
    pen.arc(x, y, 4, 0, 2 * Math.PI);
    pen.fill();
    pen.stroke();
    const text = `peak ${formatBytes(memory.totals[memory.peak])}`;
    const half = pen.measureText(text).width / 2;
    const middle = clamp(x, margins.left + half + 4, margins.left + this.plotWidth - half - 4);
    this.mark(pen, text, middle, y + 16, colors.ink, "center");
  }

  mark(pen, text, x, y, color, align) {
    this.label(pen, text, x, y, { color, align, halo: colors.halo });
  }

  hover(at, event) {
    const time = this.time(at.x);
    if (time < view.from || time > view.to || !this.timeline.memory.times.length) {
      view.cursor = null;
      hideTooltip();
      drawSoon();
      return;
    }
    view.cursor = time;
    showTooltip(this.describe(time), event.clientX, event.clientY);
    drawSoon();
  }

  describe(time) {
    const { memory, memoryIsPredicted, source, duration } = this.timeline;
    const step = this.stepAt(Math.min(time, duration));
    const rows = [...usedLayers]
      .reverse()
      .filter((layer) => memory.bytes[layer][step] > 0)
      .map((layer) => [LAYERS[layer].name, formatBytes(memory.bytes[layer][step]), swatch(colors.layers[layer])]);
    const total = memory.totals[step];
    rows.push(["in use", formatBytes(total)], ["left of the budget", formatBytes(data.budget - total)]);
    const position = memory.instructions[step];
    if ("CRP".includes(data.instructions.kinds[position])) {
      rows.push(["at", titleOf(instructionAt(position))]);
    }
    const whose = memoryIsPredicted ? `${source}, bytes as predicted` : source;
    return tooltipRows(`${formatTime(Math.min(time, duration))} (${whose})`, rows);
  }

  moveCursor(direction) {
    const { memory, source } = this.timeline;
    if (!memory.times.length) return;
    const jump = (view.to - view.from) / 100;
    const time = clamp((view.cursor ?? (view.from + view.to) / 2) + direction * jump, 0, this.timeline.duration);
    if (time < view.from || time > view.to) pan(direction * 0.5);
    view.cursor = time;
    const step = this.stepAt(time);
    const box = this.canvas.getBoundingClientRect();
    showTooltip(this.describe(time), box.left + this.x(time), box.top + this.height / 3);
    announce(`${source}, ${formatTime(time)}: ${formatBytes(memory.totals[step])} in use of ${formatBytes(data.budget)}`);
    drawSoon();
  }
}

function drawMemoryLegend(list) {
  list.replaceChildren(
    ...usedLayers.map((layer) => make("li", {}, swatch(colors.layers[layer]), LAYERS[layer].name)),
    make("li", {}, swatch("", "dashed"), "budget"),
    make("li", {}, swatch("", "dotted"), "reserved on the device"),
  );
}
