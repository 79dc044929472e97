// The table of tensors, which is filled in pages so that thousands of rows stay quick.
const ROWS_PER_PAGE = 25;

function tensorRows() {
  const rows = [];
  data.subArrays.forEach((_, subArray) => {
    profileOf(subArray).tensors.forEach((_name, position) => {
      rows.push({ subArray, position, ...tensorOf(subArray, position), decision: "kept", reasons: [], when: [] });
    });
  });
  const firstOf = [];
  data.subArrays.reduce((count, _, subArray) => {
    firstOf[subArray] = count;
    return count + profileOf(subArray).tensors.length;
  }, 0);
  for (const [subArray, position, decision, reason, when] of data.decisions) {
    const row = rows[firstOf[subArray] + position];
    if (row.decision === "kept") row.decision = decision;
    else if (row.decision !== decision) row.decision = "swapped and recomputed";
    if (reason) row.reasons.push(reason);
    row.when.push(decision === "swapped" ? swapInWords(when) : recomputeInWords(when));
  }
  return rows;
}

function nodeInWords(subArray, rank) {
  return `${nodeName(subArray, rank)} (${subArray})`;
}

function swapInWords([outSub, outRank, , , inSub, inRank]) {
  return `Out after ${nodeInWords(outSub, outRank)}, fetched back before ${nodeInWords(inSub, inRank)}.`;
}

function recomputeInWords([subArray, rank, count, time]) {
  return `Made again by ${counted(count, "node")} (${formatTime(time)}) before ${nodeInWords(subArray, rank)}.`;
}

// Every instruction that moves, frees or makes a tensor again.
function instructionsOf({ subArray, position }) {
  const { kinds, subArrays, items, keeps } = data.instructions;
  const found = new Set();
  for (let at = 0; at < kinds.length; at += 1) {
    if (subArrays[at] !== subArray) continue;
    if ("OP".includes(kinds[at]) && items[at] === position) found.add(at);
    if (kinds[at] === "R" && keeps[at].includes(position)) found.add(at);
  }
  return found;
}

class TensorTable {
  constructor(section, showInTimeline) {
    this.table = section.querySelector("table");
    this.status = section.querySelector("[data-role=count]");
    this.more = section.querySelector("[data-role=more]");
    this.filters = Object.fromEntries(
      [...section.querySelectorAll("[data-filter]")].map((control) => [control.dataset.filter, control]),
    );
    this.showInTimeline = showInTimeline;
    this.rows = tensorRows();
    this.largest = this.rows.reduce((most, row) => Math.max(most, row.bytes), 1);
    this.shown = ROWS_PER_PAGE;
    this.fillChoices();
    for (const control of Object.values(this.filters)) control.addEventListener("input", () => this.refresh());
    this.more.addEventListener("click", () => {
      const before = this.shown;
      this.shown += ROWS_PER_PAGE;
      this.draw();
      this.table.tBodies[0].rows[before]?.querySelector("button")?.focus();
    });
    const keys = ["name", "subArray", "className", "bytes", "decision", "reason"];
    const choose = makeSortable(this.table, (column, sign) => {
      const key = keys[column];
      const value = (row) => (key === "reason" ? row.reasons.join(" ") : row[key]);
      this.rows.sort((a, b) => sign * compare(value(a), value(b)) || b.bytes - a.bytes);
      this.refresh();
    });
    choose(keys.indexOf("bytes"), "descending");
  }

  fillChoices() {
    const classes = data.classes.filter((name) => this.rows.some((row) => row.className === name));
    this.filters.className.append(...classes.map((name) => make("option", { value: name }, name)));
    this.filters.subArray.append(
      ...data.subArrays.map((_, subArray) => make("option", { value: String(subArray) }, `sub-array ${subArray}`)),
    );
  }

  refresh() {
    const { text, decision, className, subArray } = this.filters;
    const wanted = text.value.trim().toLowerCase();
    this.matching = this.rows.filter(
      (row) =>
        (!wanted || row.name.toLowerCase().includes(wanted) || row.reasons.some((r) => r.toLowerCase().includes(wanted))) &&
        (!decision.value || row.decision.includes(decision.value)) &&
        (!className.value || row.className === className.value) &&
        (!subArray.value || row.subArray === Number(subArray.value)),
    );
    this.shown = ROWS_PER_PAGE;
    this.draw();
  }

  draw() {
    const visible = this.matching.slice(0, this.shown);
    this.table.tBodies[0].replaceChildren(...visible.map((row) => this.row(row)));
    const bytes = this.matching.reduce((sum, row) => sum + row.bytes, 0);
    const which = visible.length < this.matching.length ? `${grouped(visible.length, 0)} of ` : "";
    this.status.textContent = this.matching.length
      ? `${which}${counted(this.matching.length, "tensor")}, ${formatBytes(bytes)} together`
      : "No tensor matches: widen the filters.";
    const left = this.matching.length - visible.length;
    this.more.hidden = left <= 0;
    this.more.textContent = `Show ${grouped(Math.min(left, ROWS_PER_PAGE), 0)} more`;
  }

  row(row) {
    const bar = make("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${Math.max(1, (row.bytes / this.largest) * 100)}%`;
    const cell = (label, attributes, ...children) => make("td", { "data-label": label, ...attributes }, make("div", {}, ...children));
    const name =
      row.decision === "kept"
        ? make("span", { class: "name" }, row.name)
        : make("button", { type: "button", class: "name link", title: "Show in the timeline" }, row.name);
    if (row.decision !== "kept") name.addEventListener("click", () => this.showInTimeline(row));
    const why = [...row.reasons.map((reason) => make("p", {}, reason)), ...row.when.map((text) => make("p", { class: "muted" }, text))];
    return make(
      "tr",
      {},
      cell("Tensor", { class: "text" }, name),
      cell("Sub-array", { class: "short" }, String(row.subArray)),
      cell("Class", { class: "short" }, row.className),
      cell("Size", { class: "number size" }, formatBytes(row.bytes), bar),
      cell("Decision", { class: "short" }, make("span", { class: `badge ${row.decision.split(" ")[0]}` }, row.decision)),
      cell("Why", { class: "text" }, ...(why.length ? why : [make("span", { class: "muted" }, NOTHING)])),
    );
  }
}
