// One window on the clock, shared by every chart; pointer, wheel, touch and keys move it.
const SHORTEST_WINDOW = Math.min(horizon, 2000);
const view = { from: 0, to: horizon, cursor: null, selected: null, highlight: null };
const panels = [];
const tooltip = document.getElementById("tooltip");
const announcer = document.getElementById("announcer");
let colors = {};
let isDrawPending = false;

const HUES = [212, 26, 156, 284, 338, 188, 48, 104];
const darkScheme = window.matchMedia("(prefers-color-scheme: dark)");

function readColors() {
  colors = { dark: darkScheme.matches };
  for (const name of ["card", "ink", "muted", "line", "accent", "bad", "halo"]) {
    colors[name] = variable(`--${name}`);
  }
  colors.layers = LAYERS.map((layer) => variable(layer.color));
  colors.hatch = hatch(colors.dark ? "rgba(0,0,0,.5)" : "rgba(255,255,255,.72)");
  colors.stall = hatch(colors.bad);
}

function hatch(color) {
  const size = 6;
  const tile = document.createElement("canvas");
  tile.width = size;
  tile.height = size;
  const pen = tile.getContext("2d");
  pen.strokeStyle = color;
  pen.lineWidth = 1.6;
  for (const shift of [-size, 0, size]) drawLine(pen, shift, size, shift + size, 0);
  return pen.createPattern(tile, "repeat");
}

// A sub-array has a hue; forward, backward and update are shades of it.
function shade(subArray, phase) {
  const lightness = colors.dark ? { f: 70, b: 50, u: 36 } : { f: 66, b: 45, u: 29 };
  const round = Math.floor(subArray / HUES.length);
  return `hsl(${HUES[subArray % HUES.length] + 11 * round} 62% ${lightness[phase]}%)`;
}

function inkOn(phase) {
  return phase === "f" ? "#0d1218" : "#ffffff";
}

function drawLine(pen, x1, y1, x2, y2) {
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}

const margins = { left: 64, right: 14 };
const FONT = "11px system-ui, sans-serif";

class Panel {
  constructor(canvas, height) {
    this.canvas = canvas;
    this.height = height;
    this.pen = canvas.getContext("2d");
    panels.push(this);
  }

  get plotWidth() {
    return Math.max(1, this.width - margins.left - margins.right);
  }

  x(time) {
    return margins.left + ((time - view.from) / (view.to - view.from)) * this.plotWidth;
  }

  time(x) {
    return view.from + ((x - margins.left) / this.plotWidth) * (view.to - view.from);
  }

  redraw() {
    const scale = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    if (!width) return;
    this.width = width;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(this.height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(this.height * scale);
      this.canvas.style.height = `${this.height}px`;
    }
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    this.pen.clearRect(0, 0, width, this.height);
    this.pen.font = FONT;
    this.draw(this.pen);
  }

  clipToPlot(pen, top, bottom, paint) {
    pen.save();
    pen.beginPath();
    pen.rect(margins.left, top, this.plotWidth, bottom - top);
    pen.clip();
    paint();
    pen.restore();
  }

  // Text with a halo, which can be read on whatever lies below it.
  label(pen, text, x, y, { color, align = "left", baseline = "middle", halo = colors.card, weight = "600 " }) {
    pen.font = weight + FONT;
    pen.textAlign = align;
    pen.textBaseline = baseline;
    pen.lineJoin = "round";
    pen.lineWidth = 4;
    pen.strokeStyle = halo;
    pen.strokeText(text, x, y);
    pen.fillStyle = color;
    pen.fillText(text, x, y);
    pen.font = FONT;
  }

  // Horizontal lines across the plot, each with its label in the margin.
  drawRows(pen, values, y, text) {
    pen.strokeStyle = colors.line;
    pen.fillStyle = colors.muted;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const value of values) {
      const at = Math.round(y(value)) + 0.5;
      drawLine(pen, margins.left, at, margins.left + this.plotWidth, at);
      pen.fillText(text(value), margins.left - 8, at);
    }
  }

  drawTimeAxis(pen, top, bottom) {
    const { values, places } = ticks(view.from, view.to, 1e6, Math.max(2, this.plotWidth / 80));
    pen.strokeStyle = colors.line;
    pen.fillStyle = colors.muted;
    pen.lineWidth = 1;
    pen.textBaseline = "top";
    for (const value of values) {
      const x = Math.round(this.x(value)) + 0.5;
      drawLine(pen, x, top, x, bottom + 4);
      const label = `${grouped(value / 1e6, places)} ms`;
      const half = pen.measureText(label).width / 2;
      pen.textAlign = "left";
      pen.fillText(label, clamp(x - half, margins.left - 8, this.width - 2 * half), bottom + 6);
    }
  }

  drawCursor(pen, top, bottom) {
    if (view.cursor === null || view.cursor < view.from || view.cursor > view.to) return;
    const x = Math.round(this.x(view.cursor)) + 0.5;
    pen.strokeStyle = colors.ink;
    pen.globalAlpha = 0.55;
    pen.lineWidth = 1;
    drawLine(pen, x, top, x, bottom);
    pen.globalAlpha = 1;
  }
}

// Left and right arrows choose the previous or the next of `count` things on a panel.
function walkWithArrows(panel, count, choose) {
  panel.canvas.addEventListener("keydown", (event) => {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction || !count) return;
    event.preventDefault();
    choose(clamp((panel.chosen ?? (direction > 0 ? -1 : count)) + direction, 0, count - 1));
  });
}

function drawSoon() {
  if (isDrawPending) return;
  isDrawPending = true;
  requestAnimationFrame(() => {
    isDrawPending = false;
    drawNow();
  });
}

function drawNow() {
  for (const panel of panels) panel.redraw();
}

function setWindow(from, to) {
  const length = clamp(to - from, SHORTEST_WINDOW, horizon);
  view.from = clamp(from, 0, horizon - length);
  view.to = view.from + length;
  const whole = length >= horizon * 0.9999;
  document.getElementById("window").textContent = whole
    ? `whole step, ${formatTime(horizon)}`
    : `${formatTime(view.from)} to ${formatTime(view.to)}`;
  document.getElementById("zoom-fit").disabled = whole;
  document.getElementById("zoom-out").disabled = whole;
  document.getElementById("pan-left").disabled = view.from <= 0;
  document.getElementById("pan-right").disabled = view.to >= horizon;
  drawSoon();
}

function zoom(factor, around = (view.from + view.to) / 2) {
  const length = clamp((view.to - view.from) / factor, SHORTEST_WINDOW, horizon);
  const share = (around - view.from) / (view.to - view.from);
  setWindow(around - share * length, around + (1 - share) * length);
}

function pan(share) {
  const shift = share * (view.to - view.from);
  setWindow(view.from + shift, view.to + shift);
}

function showTooltip(content, clientX, clientY) {
  tooltip.replaceChildren(...content);
  tooltip.hidden = false;
  const box = tooltip.getBoundingClientRect();
  const room = 8;
  let left = clientX + 16;
  if (left + box.width > window.innerWidth - room) left = clientX - box.width - 16;
  tooltip.style.left = `${clamp(left, room, window.innerWidth - box.width - room)}px`;
  tooltip.style.top = `${clamp(clientY + 16, room, window.innerHeight - box.height - room)}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}

function hideTooltipOnTheWay() {
  window.addEventListener("scroll", hideTooltip, { passive: true });
  document.addEventListener("pointerdown", (event) => {
    if (event.target.tagName !== "CANVAS") hideTooltip();
  });
}

function announce(text) {
  announcer.textContent = text;
}

function tooltipRows(title, rows) {
  const list = make("dl");
  for (const [label, value, mark] of rows) {
    list.append(make("div", {}, make("dt", {}, ...(mark ? [mark] : []), label), make("dd", {}, value)));
  }
  return [make("strong", {}, title), list];
}

// Pointer, wheel and touch on a panel. A drag moves the window, two fingers zoom, a click selects.
function makeInteractive(panel) {
  const { canvas } = panel;
  const pointers = new Map();
  let travelled = 0;
  const offset = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, offset(event));
    travelled = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const at = offset(event);
    const before = pointers.get(event.pointerId);
    if (!before) {
      panel.hover(at, event);
      return;
    }
    if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const middle = panel.time((at.x + other.x) / 2);
      zoom(Math.max(8, Math.abs(at.x - other.x)) / Math.max(8, Math.abs(before.x - other.x)), middle);
    } else {
      travelled += Math.abs(at.x - before.x);
      if (travelled > 3) {
        hideTooltip();
        canvas.classList.add("dragged");
        pan((before.x - at.x) / panel.plotWidth);
      }
    }
    pointers.set(event.pointerId, at);
  });
  const release = (event) => {
    canvas.classList.remove("dragged");
    if (pointers.delete(event.pointerId) && event.type === "pointerup" && travelled <= 3) {
      panel.hover(offset(event), event);
      panel.select?.(offset(event));
    }
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "touch") return; // a finger leaves with every tap: what it asked for stays
    view.cursor = null;
    hideTooltip();
    drawSoon();
  });
  canvas.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 1 / 2.5 : 2.5, panel.time(offset(event).x)));
  canvas.addEventListener(
    "wheel",
    (event) => {
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (event.ctrlKey || event.metaKey) zoom(Math.exp(-event.deltaY / 240), panel.time(offset(event).x));
      else if (sideways) pan((event.deltaX || event.deltaY) / panel.plotWidth);
      else return;
      event.preventDefault();
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      "+": () => zoom(1.6),
      "=": () => zoom(1.6),
      "-": () => zoom(1 / 1.6),
      0: () => setWindow(0, horizon),
      Home: () => setWindow(0, horizon),
      Escape: () => clearSelection(),
    };
    let act = keys[event.key];
    if (event.shiftKey && event.key === "ArrowLeft") act = () => pan(-0.2);
    if (event.shiftKey && event.key === "ArrowRight") act = () => pan(0.2);
    act ??= panel.keys?.[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  canvas.addEventListener("blur", hideTooltip);
}

function clearSelection() {
  view.selected = null;
  view.cursor = null;
  setHighlight(null);
  hideTooltip();
  drawSoon();
}

function setHighlight(instructions, label = "") {
  view.highlight = instructions;
  const button = document.getElementById("clear-highlight");
  button.hidden = instructions === null;
  button.textContent = instructions === null ? "" : `Stop highlighting ${label}`;
  drawSoon();
}
