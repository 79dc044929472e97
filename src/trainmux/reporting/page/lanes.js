// The three lanes of each timeline as a Gantt chart.
const LANE_HEIGHTS = [38, 24, 24];
const LANE_GAP = 5;
const GROUP_TITLE = 22;
const GROUP_GAP = 12;
const DIMMED = 0.22;
const STALL_KEY = 3 * data.subArrays.length;

function keyOf({ subArray, phase }) {
  return 3 * subArray + "fbu".indexOf(phase);
}

const NARROW = 1.5;
const COLUMN = 3;

// Many narrow spans would hide each other. A column of pixels then shows by its height which share of its time
// goes to each sub-array and phase; what is left free is idle.
class ColumnShares {
  constructor(width) {
    this.count = Math.ceil(width / COLUMN);
    this.byKey = new Map();
    this.added = 0;
  }

  get areNeeded() {
    return this.added > this.count / 2;
  }

  add(key, left, right) {
    this.added += 1;
    if (!this.byKey.has(key)) this.byKey.set(key, new Float32Array(this.count));
    const columns = this.byKey.get(key);
    const begin = (left - margins.left) / COLUMN;
    const end = (right - margins.left) / COLUMN;
    for (let at = Math.max(0, Math.floor(begin)); at <= end && at < this.count; at += 1) {
      columns[at] += Math.min(end, at + 1) - Math.max(begin, at);
    }
  }

  draw(pen, row) {
    pen.globalAlpha = view.highlight === null ? 1 : DIMMED;
    const bottoms = new Float32Array(this.count).fill(row.y + row.height);
    for (const key of [...this.byKey.keys()].sort((a, b) => a - b)) {
      pen.fillStyle = key === STALL_KEY ? colors.stall : shade(Math.floor(key / 3), "fbu"[key % 3]);
      const columns = this.byKey.get(key);
      for (let at = 0; at < this.count; at += 1) {
        if (!columns[at]) continue;
        const height = Math.min(1, columns[at]) * row.height;
        bottoms[at] -= height;
        pen.fillRect(margins.left + at * COLUMN, bottoms[at], COLUMN, height);
      }
    }
    pen.globalAlpha = 1;
  }
}

class LanesPanel extends Panel {
  constructor(canvas) {
    const rows = [];
    let y = 4;
    timelines.forEach((timeline, number) => {
      const title = y + GROUP_TITLE / 2;
      y += GROUP_TITLE;
      LANE_HEIGHTS.forEach((height, lane) => {
        rows.push({ timeline: number, lane, y, height, title: lane === 0 ? title : null });
        y += height + LANE_GAP;
      });
      y += GROUP_GAP - LANE_GAP;
    });
    super(canvas, y + 24);
    this.rows = rows;
    this.bottom = y;
    this.keys = {
      ArrowLeft: () => this.moveSelection(-1),
      ArrowRight: () => this.moveSelection(1),
      ArrowUp: () => this.moveRow(-1),
      ArrowDown: () => this.moveRow(1),
      Enter: () => this.zoomToSelection(),
    };
    this.row = 0;
    makeInteractive(this);
  }

  draw(pen) {
    this.drawTimeAxis(pen, 4, this.bottom);
    for (const row of this.rows) this.drawRow(pen, row);
    this.drawCursor(pen, 4, this.bottom);
  }

  drawRow(pen, row) {
    const timeline = timelines[row.timeline];
    if (row.title !== null) {
      const text = `${timeline.source}, ${formatTime(timeline.duration)}`;
      this.label(pen, text, margins.left, row.title, { color: colors.ink });
    }
    pen.textBaseline = "middle";
    pen.fillStyle = colors.muted;
    pen.textAlign = "right";
    pen.fillText(LANE_LABELS[row.lane], margins.left - 8, row.y + row.height / 2);
    pen.fillStyle = colors.line;
    pen.globalAlpha = 0.35;
    const end = clamp(this.x(timeline.duration), margins.left, margins.left + this.plotWidth);
    const begin = clamp(this.x(0), margins.left, margins.left + this.plotWidth);
    pen.fillRect(begin, row.y, end - begin, row.height);
    pen.globalAlpha = 1;
    this.clipToPlot(pen, row.y - 2, row.y + row.height + 2, () => {
      const lane = timeline.lanes[row.lane];
      const shares = new ColumnShares(this.plotWidth);
      this.shareNarrow(shares, lane, (at) => keyOf(instructionAt(lane.instructions[at])));
      if (row.lane === 0) this.shareNarrow(shares, timeline.stalls, () => STALL_KEY);
      if (shares.areNeeded) shares.draw(pen, row);
      const narrowest = shares.areNeeded ? NARROW : 0;
      if (row.lane === 0) this.drawStalls(pen, row, timeline.stalls, narrowest);
      this.drawSpans(pen, row, lane, narrowest);
      this.drawSelected(pen, row, timeline);
    });
  }

  shareNarrow(shares, { starts, ends }, key) {
    for (let at = firstAbove(ends, view.from); at < starts.length && starts[at] < view.to; at += 1) {
      const left = this.x(starts[at]);
      const right = this.x(ends[at]);
      if (right - left < NARROW) shares.add(key(at), left, right);
    }
  }

  drawStalls(pen, row, stalls, narrowest) {
    pen.fillStyle = colors.stall;
    pen.globalAlpha = view.highlight === null ? 1 : DIMMED;
    for (let at = firstAbove(stalls.ends, view.from); at < stalls.starts.length && stalls.starts[at] < view.to; at += 1) {
      const left = this.x(stalls.starts[at]);
      const right = this.x(stalls.ends[at]);
      if (right - left >= narrowest) pen.fillRect(left, row.y, right - left, row.height);
    }
    pen.globalAlpha = 1;
  }

  drawSpans(pen, row, lane, narrowest) {
    for (let at = firstAbove(lane.ends, view.from); at < lane.starts.length && lane.starts[at] < view.to; at += 1) {
      const left = this.x(lane.starts[at]);
      const right = this.x(lane.ends[at]);
      const isLit = view.highlight === null || view.highlight.has(lane.instructions[at]);
      if (right - left < narrowest && (view.highlight === null || !isLit)) continue;
      const instruction = instructionAt(lane.instructions[at]);
      const width = Math.max(NARROW, right - left - (right - left > 4 ? 1 : 0));
      pen.globalAlpha = isLit ? 1 : DIMMED;
      pen.fillStyle = shade(instruction.subArray, instruction.phase);
      pen.fillRect(left, row.y, width, row.height);
      if (instruction.kind === "R") {
        pen.fillStyle = colors.hatch;
        pen.fillRect(left, row.y, width, row.height);
      }
      if (right - left > 46) this.drawName(pen, row, instruction, Math.max(left, margins.left), right);
      pen.globalAlpha = 1;
    }
  }

  drawName(pen, row, instruction, left, right) {
    const room = right - left - 10;
    const size = pen.measureText("m").width * 0.62;
    const most = Math.floor(room / size);
    if (most < 4) return;
    const title = titleOf(instruction);
    const text = title.length <= most ? title : `${title.slice(0, most - 1)}…`;
    pen.save();
    pen.beginPath();
    pen.rect(left, row.y, right - left - 3, row.height);
    pen.clip();
    pen.textAlign = "left";
    if (instruction.kind === "R") {
      pen.fillStyle = shade(instruction.subArray, "f");
      pen.fillRect(left + 3, row.y + row.height / 2 - 8, pen.measureText(text).width + 4, 16);
    }
    pen.fillStyle = inkOn(instruction.phase);
    pen.fillText(text, left + 5, row.y + row.height / 2);
    pen.restore();
  }

  drawSelected(pen, row, timeline) {
    if (view.selected === null) return;
    const span = spanOf(timeline, view.selected);
    if (!span || span.lane !== row.lane) return;
    const left = this.x(span.start);
    pen.strokeStyle = colors.ink;
    pen.lineWidth = 2;
    pen.strokeRect(left, row.y, Math.max(2, this.x(span.end) - left), row.height);
  }

  rowAt(y) {
    return this.rows.find((row) => y >= row.y - LANE_GAP / 2 && y <= row.y + row.height + LANE_GAP / 2) ?? null;
  }

  // The span under a point, or the nearest one that is at most three pixels away.
  spanAt(row, x) {
    const lane = timelines[row.timeline].lanes[row.lane];
    const time = this.time(x);
    const reach = (3 / this.plotWidth) * (view.to - view.from);
    const after = clamp(firstAbove(lane.ends, time), 0, lane.ends.length - 1);
    let best = -1;
    let closest = reach;
    for (const at of [after - 1, after, after + 1]) {
      if (at < 0 || at >= lane.starts.length) continue;
      const distance = Math.max(lane.starts[at] - time, time - lane.ends[at], 0);
      if (distance < closest || (distance === 0 && best < 0)) {
        best = at;
        closest = distance;
      }
    }
    return best < 0 ? null : lane.instructions[best];
  }

  stallAt(row, x) {
    if (row.lane !== 0) return null;
    const { stalls } = timelines[row.timeline];
    const time = this.time(x);
    const at = firstAbove(stalls.ends, time);
    return at < stalls.starts.length && stalls.starts[at] <= time ? at : null;
  }

  hover(at, event) {
    const row = this.rowAt(at.y);
    const isInside = at.x >= margins.left && at.x <= margins.left + this.plotWidth;
    view.cursor = isInside ? this.time(at.x) : null;
    drawSoon();
    const instruction = row && isInside ? this.spanAt(row, at.x) : null;
    const stall = row && isInside ? this.stallAt(row, at.x) : null;
    const isExactStall = stall !== null && this.stallIsWide(row, stall);
    if (instruction !== null && !isExactStall) showTooltip(describeInstruction(instruction), event.clientX, event.clientY);
    else if (stall !== null) showTooltip(describeStall(timelines[row.timeline], stall), event.clientX, event.clientY);
    else hideTooltip();
  }

  stallIsWide(row, stall) {
    const { stalls } = timelines[row.timeline];
    return this.x(stalls.ends[stall]) - this.x(stalls.starts[stall]) > 4;
  }

  select(at) {
    const row = this.rowAt(at.y);
    if (!row) return;
    this.row = this.rows.indexOf(row);
    view.selected = this.spanAt(row, at.x);
    drawSoon();
  }

  moveSelection(direction) {
    const { timeline, lane } = this.rows[this.row];
    const spans = timelines[timeline].lanes[lane];
    if (!spans.instructions.length) return;
    const place = view.selected === null ? null : timelines[timeline].placeOf.get(view.selected);
    const at = place && place.lane === lane ? place.index + direction : firstAbove(spans.ends, view.from);
    this.selectSpan(spans.instructions[clamp(at, 0, spans.instructions.length - 1)]);
  }

  moveRow(direction) {
    const before = this.rows[this.row];
    const span = view.selected === null ? null : spanOf(timelines[before.timeline], view.selected);
    this.row = clamp(this.row + direction, 0, this.rows.length - 1);
    const { timeline, lane } = this.rows[this.row];
    const spans = timelines[timeline].lanes[lane];
    if (!spans.instructions.length) {
      announce(`${timelines[timeline].source}, ${data.lanes[lane]}: nothing runs`);
      return;
    }
    const at = clamp(firstAbove(spans.ends, span ? span.start : view.from), 0, spans.instructions.length - 1);
    this.selectSpan(spans.instructions[at]);
  }

  selectSpan(instruction) {
    view.selected = instruction;
    const row = this.rows[this.row];
    const span = spanOf(timelines[row.timeline], instruction);
    if (span.start < view.from || span.end > view.to) {
      const length = Math.max(view.to - view.from, (span.end - span.start) * 1.2);
      const middle = (span.start + span.end) / 2;
      setWindow(middle - length / 2, middle + length / 2);
    }
    const box = this.canvas.getBoundingClientRect();
    const x = this.x((span.start + span.end) / 2);
    showTooltip(describeInstruction(instruction), box.left + x, box.top + row.y + row.height);
    announce(
      `${timelines[row.timeline].source}, ${data.lanes[row.lane]}: ${titleOf(instructionAt(instruction))}, ` +
        `starts at ${formatTime(span.start)}, takes ${formatTime(span.end - span.start)}`,
    );
    drawSoon();
  }

  zoomToSelection() {
    if (view.selected === null) return;
    const span = spanOf(timelines[this.rows[this.row].timeline], view.selected);
    if (!span) return;
    const length = Math.max(span.end - span.start, SHORTEST_WINDOW);
    setWindow(span.start - length, span.end + length);
  }
}

function describeInstruction(position) {
  const instruction = instructionAt(position);
  const members = data.subArrays[instruction.subArray].members;
  const rows = [
    ["what", kindInWords(instruction), swatch(shade(instruction.subArray, instruction.phase))],
    ["sub-array", `${instruction.subArray} (${counted(members.length, "member")})`],
  ];
  const spans = timelines.map((timeline) => spanOf(timeline, position));
  timelines.forEach((timeline, number) => {
    const span = spans[number];
    if (!span) return;
    const prefix = timelines.length > 1 ? `${timeline.source} ` : "";
    rows.push([`${prefix}start`, formatTime(span.start)], [`${prefix}duration`, formatTime(span.end - span.start)]);
  });
  if (spans.length > 1 && spans[0] && spans[1]) {
    const [predicted, measured] = spans.map((span) => span.end - span.start);
    rows.push(["difference", formatChange(measured, predicted)]);
  }
  if ("OP".includes(instruction.kind)) {
    rows.push(["class", instruction.className], ["size", formatBytes(instruction.bytes)]);
    const span = spans.findLast((found) => found !== null);
    if (span && span.end > span.start) {
      rows.push(["rate", `${grouped(instruction.bytes / (span.end - span.start), 1)} GB/s`]);
    }
  }
  for (const kept of instruction.keeps) {
    const tensor = tensorOf(instruction.subArray, kept);
    rows.push(["makes again", `${tensor.name} (${formatBytes(tensor.bytes)})`]);
  }
  return tooltipRows(instruction.name, rows);
}

function describeStall(timeline, at) {
  const { starts, ends, waitsFor } = timeline.stalls;
  const cause = waitsFor[at] < 0 ? "nothing in the program" : titleOf(instructionAt(waitsFor[at]));
  return tooltipRows("compute is idle", [
    ["start", formatTime(starts[at])],
    ["duration", formatTime(ends[at] - starts[at])],
    ["waits for", cause],
  ]);
}

function drawLanesLegend(list) {
  const items = data.subArrays.flatMap((_, subArray) => {
    const marks = ["f", "b", "u"].map((phase) => swatch(shade(subArray, phase), "joined"));
    return [make("li", {}, make("span", { class: "swatches" }, ...marks), `sub-array ${subArray}: forward, backward, update`)];
  });
  list.replaceChildren(
    ...items,
    make("li", {}, swatch("", "hatched"), "recompute"),
    make("li", {}, swatch("", "stalled"), "compute is idle"),
  );
}
