// Draws the charts in the page's own colours, and again when the colour scheme changes.
const darkScheme = window.matchMedia("(prefers-color-scheme: dark)");
const plots = [...document.querySelectorAll("script[data-for]")].map((source) => ({
  element: document.getElementById(source.dataset.for),
  figure: JSON.parse(source.textContent),
}));

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Colours of a figure that are variables of the page, such as "var(--accent)".
function painted(value) {
  if (typeof value === "string") return value.startsWith("var(") ? color(value.slice(4, -1)) : value;
  if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map(painted);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, painted(inner)]));
}

function parts(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// A shade that a chart was drawn in for white pages: the darker it is, the nearer to the page's accent.
function reshaded(shade) {
  const [red, green, blue] = shade.match(/[\d.]+/g).map(Number);
  const share = 1 - (0.3 * red + 0.59 * green + 0.11 * blue) / 255;
  const [from, to] = [parts(color("--line")), parts(color("--accent"))];
  return `rgb(${from.map((part, at) => Math.round(part + share * (to[at] - part))).join(",")})`;
}

function traceOf(trace) {
  const ours = painted(trace);
  const scale = [[0, color("--line")], [1, color("--accent")]];
  if (/^rgb/.test(ours.line?.color)) ours.line.color = reshaded(ours.line.color);
  if (ours.marker?.colorscale) ours.marker.colorscale = scale;
  if (trace.type === "parcoords") {
    Object.assign(ours, { labelfont: { color: color("--ink") }, tickfont: { color: color("--muted") } });
    ours.line.colorscale = scale;
  }
  return ours;
}

function layoutOf(figure) {
  const layout = painted(figure.layout);
  const clear = "rgba(0,0,0,0)";
  Object.assign(layout, {
    paper_bgcolor: clear,
    plot_bgcolor: clear,
    font: { ...layout.font, color: color("--ink"), family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } },
  });
  for (const axis of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
    Object.assign(layout[axis], { gridcolor: color("--line"), linecolor: color("--line"), zeroline: false });
  }
  for (const note of layout.annotations ?? []) {
    Object.assign(note, { bgcolor: color("--halo"), font: { ...note.font, color: color("--ink") } });
  }
  return layout;
}

async function draw() {
  const options = { responsive: true, displayModeBar: false };
  for (const { element, figure } of plots) {
    await Plotly.react(element, figure.data.map(traceOf), layoutOf(figure), options);
  }
  document.documentElement.dataset.ready = "true";
}

for (const table of document.querySelectorAll("table.sortable")) makeStaticSortable(table);
darkScheme.addEventListener("change", draw);
draw();
