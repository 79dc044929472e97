// Puts the charts and tables into the page.
function drawLegends() {
  drawMemoryLegend(document.getElementById("memory-legend"));
  drawLanesLegend(document.getElementById("lanes-legend"));
}

function showTensorInTimeline(row) {
  const instructions = instructionsOf(row);
  setWindow(0, horizon);
  setHighlight(instructions, row.name);
  view.selected = instructions.size ? [...instructions][0] : null;
  document.getElementById("lanes").scrollIntoView({ block: "center" });
  document.querySelector("#lanes canvas").focus({ preventScroll: true });
  announce(`${row.name}: ${counted(instructions.size, "instruction")} highlighted in the timeline`);
}

function start() {
  readColors();
  timelines.forEach((timeline, number) => {
    new MemoryPanel(document.querySelector(`#memory-${number} canvas`), timeline);
  });
  new LanesPanel(document.querySelector("#lanes canvas"));
  for (const part of data.around) new AroundPanel(document.querySelector(`#${part.name} canvas`), part);
  const budgetCanvas = document.querySelector("#budget-curve canvas");
  if (budgetCanvas) new BudgetPanel(budgetCanvas);
  drawLegends();
  for (const table of document.querySelectorAll("table.sortable")) makeStaticSortable(table);
  new TensorTable(document.getElementById("tensors"), showTensorInTimeline);
  const buttons = {
    "zoom-in": () => zoom(1.6),
    "zoom-out": () => zoom(1 / 1.6),
    "zoom-fit": () => setWindow(0, horizon),
    "pan-left": () => pan(-0.25),
    "pan-right": () => pan(0.25),
    "clear-highlight": clearSelection,
  };
  for (const [id, act] of Object.entries(buttons)) document.getElementById(id).addEventListener("click", act);
  darkScheme.addEventListener("change", () => {
    readColors();
    drawLegends();
    drawSoon();
  });
  hideTooltipOnTheWay();
  new ResizeObserver(drawSoon).observe(document.body);
  setWindow(0, horizon);
  drawNow();
  document.documentElement.dataset.ready = "true";
}

start();
