// Numbers as people read them, and small helpers for elements. Names reach the page as text nodes only.
const NOTHING = "-";
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function grouped(value, places) {
  return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}

function formatBytes(bytes) {
  const sign = bytes < 0 ? "-" : "";
  let value = Math.abs(bytes);
  let unit = 0;
  while (unit < BYTE_UNITS.length - 1 && Math.round(value) >= 1024) {
    value /= 1024;
    unit += 1;
  }
  const places = unit >= 3 ? 2 : unit === 2 && value < 99.95 ? 1 : 0;
  return `${sign}${grouped(value, places)} ${BYTE_UNITS[unit]}`;
}

function formatTime(nanoseconds) {
  if (nanoseconds === null || !Number.isFinite(nanoseconds)) return NOTHING;
  const ms = nanoseconds / 1e6;
  const size = Math.abs(ms);
  if (size === 0) return "0 ms";
  if (size < 0.0005) return ms > 0 ? "<0.001 ms" : ">-0.001 ms";
  return `${grouped(ms, size < 1 ? 3 : size < 1000 ? 2 : 1)} ms`;
}

function formatChange(value, reference) {
  if (!reference || !Number.isFinite(value) || !Number.isFinite(reference)) return NOTHING;
  const percent = (value / reference - 1) * 100;
  return `${percent >= 0.05 ? "+" : ""}${percent.toFixed(1)}%`;
}

function counted(number, noun) {
  return `${grouped(number, 0)} ${number === 1 ? noun : `${noun}s`}`;
}

// Axis labels a round distance apart: 1, 2 or 5 times a power of ten of the unit.
function ticks(from, to, unit, atMost) {
  const rough = (to - from) / unit / Math.max(1, atMost);
  if (!(rough > 0)) return { values: [], places: 0 };
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const values = [];
  const first = Math.ceil(from / unit / step - 1e-9);
  for (let index = first; index * step * unit <= to * (1 + 1e-12); index += 1) {
    values.push(index * step * unit + 0); // + 0: no negative zero
  }
  return { values, places };
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function swatch(paint, extraClass = "") {
  const mark = make("span", { class: `swatch ${extraClass}`.trim(), "aria-hidden": "true" });
  if (paint) mark.style.background = paint;
  return mark;
}

// The position of the first entry that is greater than `value`, in an ascending array.
function firstAbove(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

function clamp(value, least, most) {
  return Math.min(Math.max(value, least), Math.max(least, most));
}

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
