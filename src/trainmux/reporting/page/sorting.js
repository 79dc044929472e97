// Tables that sort by each of their columns.
const collator = new Intl.Collator("en", { numeric: true });

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return collator.compare(String(a), String(b));
}

// Headers are buttons; where columns become cards, a list offers the same orders.
function makeSortable(table, sortBy) {
  const headers = [...table.tHead.rows[0].cells];
  const choose = (column, direction) => {
    headers.forEach((header, at) => header.setAttribute("aria-sort", at === column ? direction : "none"));
    list.value = `${column} ${direction}`;
    sortBy(column, direction === "ascending" ? 1 : -1);
  };
  const list = make("select", {});
  list.append(make("option", { value: "" }, "as given"));
  headers.forEach((header, column) => {
    const button = header.querySelector("button");
    const first = header.classList.contains("number") ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    button.addEventListener("click", () => choose(column, header.getAttribute("aria-sort") === first ? other : first));
    for (const direction of [first, other]) {
      list.append(make("option", { value: `${column} ${direction}` }, `${button.textContent.trim()}, ${direction}`));
    }
  });
  list.addEventListener("change", () => {
    if (!list.value) return;
    const [column, direction] = list.value.split(" ");
    choose(Number(column), direction);
  });
  table.closest(".table").before(make("label", { class: "sort" }, "Sort by ", list));
  return choose;
}

function makeStaticSortable(table) {
  const body = table.tBodies[0];
  const value = (row, column) => {
    const text = row.cells[column].dataset.sort;
    const number = Number(text);
    return text !== "" && Number.isFinite(number) ? number : text === "" ? Infinity : text;
  };
  makeSortable(table, (column, sign) => {
    const rows = [...body.rows];
    rows.sort((a, b) => sign * compare(value(a, column), value(b, column)));
    body.append(...rows);
  });
}
