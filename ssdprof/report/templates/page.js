"use strict";

// A click on a header sorts by its column, a second one the other way round.  Cells without a number come last.
function sortBy(header) {
  const table = header.closest("table");
  const column = header.cellIndex;
  const ascending = header.getAttribute("aria-sort") !== "ascending";
  for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows];
  const numeric = rows.some((row) => row.cells[column].dataset.key !== undefined);
  const compare = (a, b) => {
    const [left, right] = [a.cells[column], b.cells[column]];
    if (!numeric) return left.textContent.localeCompare(right.textContent) * (ascending ? 1 : -1);
    const [x, y] = [left.dataset.key, right.dataset.key].map((key) => (key === undefined ? NaN : Number(key)));
    if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
    return (x - y) * (ascending ? 1 : -1);
  };
  table.tBodies[0].append(...rows.sort(compare));
}

for (const button of document.querySelectorAll("table.sortable button")) {
  button.addEventListener("click", () => sortBy(button.closest("th")));
}

// A table that is wider than the page gets smaller, then its cells wrap, so that its columns stay; on a phone it becomes
// a list of its rows.
function fit() {
  const looks = document.body.clientWidth < 600 ? ["tight", "stacked"] : ["tight", "wrapped"];
  for (const box of document.querySelectorAll(".scroll")) {
    const table = box.querySelector("table");
    if (!table) continue;
    table.classList.remove("tight", "wrapped", "stacked");
    for (const look of looks) if (box.scrollWidth > box.clientWidth) table.classList.add(look);
  }
}
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells], rows = [...table.tBodies[0].rows];
  const names = heads.map((cell) => cell.textContent.trim());
  heads.forEach((head, column) => {
    const cells = rows.map((row) => row.cells[column]);
    if (cells.every((cell) => cell.textContent === "-"))  // a narrow page leaves this column out
      for (const cell of [head, ...cells]) cell.classList.add("void");
  });
  for (const row of rows) {
    [...row.cells].forEach((cell, column) => {
      cell.dataset.name = names[column];
      cell.classList.toggle("none", cell.textContent === "-");
    });
  }
}
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", fit);
addEventListener("resize", fit);
fit();

// A link to a folded section opens it.
function openTarget() {
  const target = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
  if (target instanceof HTMLDetailsElement) target.open = true;
}
addEventListener("hashchange", openTarget);
openTarget();
