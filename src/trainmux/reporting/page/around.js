// What runs once, before the first step or after the last one: the three lanes, small and on a clock of their own.
const AROUND_HEIGHTS = [18, 10, 10];
const AROUND_GAP = 3;

class AroundPanel extends Panel {
  constructor(canvas, part) {
    const rows = [];
    let y = 2;
    AROUND_HEIGHTS.forEach((height, lane) => {
      rows.push({ lane, y, height });
      y += height + AROUND_GAP;
    });
    super(canvas, y);
    this.rows = rows;
    this.part = part;
    this.duration = Math.max(1, part.duration);
    this.lanes = decodeLanes(part.spans);
    this.chosen = null;
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", hideTooltip);
    canvas.addEventListener("blur", hideTooltip);
    walkWithArrows(this, this.lanes[0].instructions.length, (at) => {
      this.chosen = at;
      this.tellChosen();
    });
  }

  x(time) {
    return margins.left + (time / this.duration) * this.plotWidth;
  }

  time(x) {
    return ((x - margins.left) / this.plotWidth) * this.duration;
  }

  instruction(row, at) {
    return instructionAt(this.lanes[row.lane].instructions[at], this.part.instructions);
  }

  draw(pen) {
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const row of this.rows) {
      pen.fillStyle = colors.muted;
      pen.fillText(LANE_LABELS[row.lane], margins.left - 8, row.y + row.height / 2);
      pen.fillStyle = colors.line;
      pen.globalAlpha = 0.35;
      pen.fillRect(margins.left, row.y, this.plotWidth, row.height);
      pen.globalAlpha = 1;
      const { starts, ends } = this.lanes[row.lane];
      for (let at = 0; at < starts.length; at += 1) {
        const left = this.x(starts[at]);
        const { subArray, phase } = this.instruction(row, at);
        pen.fillStyle = shade(subArray, phase);
        pen.fillRect(left, row.y, Math.max(1, this.x(ends[at]) - left), row.height);
      }
    }
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const y = event.clientY - box.top;
    const row = this.rows.find((found) => y >= found.y && y <= found.y + found.height);
    const time = this.time(event.clientX - box.left);
    const at = row ? firstAbove(this.lanes[row.lane].ends, time) : 0;
    if (row && this.lanes[row.lane].starts[at] <= time) {
      showTooltip(this.describe(row, at), event.clientX, event.clientY);
    } else hideTooltip();
  }

  tellChosen() {
    const [row] = this.rows;
    const box = this.canvas.getBoundingClientRect();
    const start = this.lanes[0].starts[this.chosen];
    showTooltip(this.describe(row, this.chosen), box.left + this.x(start), box.top + row.y + row.height);
    announce(`${titleOf(this.instruction(row, this.chosen))}, starts at ${formatTime(start)}`);
  }

  describe(row, at) {
    const instruction = this.instruction(row, at);
    const { starts, ends } = this.lanes[row.lane];
    const rows = [
      ["what", kindInWords(instruction), swatch(shade(instruction.subArray, instruction.phase))],
      ["sub-array", `${instruction.subArray}`],
      ["start", formatTime(starts[at])],
      ["duration", formatTime(ends[at] - starts[at])],
    ];
    if ("OP".includes(instruction.kind)) rows.push(["size", formatBytes(instruction.bytes)]);
    return tooltipRows(instruction.name, rows);
  }
}
