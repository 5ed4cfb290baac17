"use strict";

/** Return rows in order of a column: numbers by value, words by text, empty cells last. */
function sortRows(rows, column, descending) {
  const keyOf = (row) => {
    const cell = row.cells[column];
    const number = parseFloat(cell.dataset.value);
    const text = cell.textContent.trim();
    return Number.isNaN(number) ? text : number;
  };
  const keyed = rows.map((row, place) => ({ row, place, key: keyOf(row) }));
  const sign = descending ? -1 : 1;
  keyed.sort((a, b) => {
    if ((a.key === "") !== (b.key === "")) return a.key === "" ? 1 : -1;
    const isNumber = typeof a.key === "number" && typeof b.key === "number";
    const order = isNumber
      ? a.key - b.key
      : String(a.key).localeCompare(String(b.key), undefined, { numeric: true });
    return order === 0 ? a.place - b.place : sign * order;
  });
  return keyed.map((entry) => entry.row);
}

function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      // Numbers begin with the largest, words with the first.
      const first = head.classList.contains("number") ? "descending" : "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const body = table.tBodies[0];
      body.append(...sortRows([...body.rows], column, order === "descending"));
    });
  });
}

/** Say where a table is wider than its place, until its last column is in view. */
function watchWidth(box) {
  const scroll = box.querySelector(".scroll");
  const look = () => {
    const rest = scroll.scrollWidth - scroll.clientWidth;
    box.classList.toggle("wide", rest > 1);
    box.classList.toggle("at-end", scroll.scrollLeft >= rest - 1);
    if (rest > 1) scroll.tabIndex = 0; // the arrow keys scroll it
  };
  scroll.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(scroll);
}

/** Return the look of a chart of a width in a theme. */
function chartConfig(isDark, width) {
  const text = isDark ? "#cfd6de" : "#3c4752";
  const faint = isDark ? "#98a3b0" : "#66717d";
  const line = isDark ? "#2b323b" : "#e8ebef";
  const font = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
  return {
    background: null,
    font,
    view: { stroke: null },
    axis: {
      labelColor: faint, titleColor: faint, titleFontWeight: "normal", labelFontSize: 11.5,
      titleFontSize: 12, gridColor: line, domainColor: line, tickColor: line,
    },
    legend: {
      labelColor: text, titleColor: faint, titleFontWeight: "normal", labelFontSize: 12, orient: "bottom",
      columns: Math.max(1, Math.floor((width - 60) / 150)), labelLimit: 135,
      gradientLength: 160,
    },
  };
}

const views = new Map();

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen === "dark";
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Draw a chart again, with the choices that its menus have now. */
async function draw(figure) {
  const name = figure.dataset.chart;
  const spec = JSON.parse(document.getElementById(`spec-${name}`).textContent);
  const before = views.get(name);
  for (const param of spec.params || []) {
    if (before && "value" in param) param.value = before.view.signal(param.name);
  }
  const menu = document.getElementById("partition-menu");
  const partition = (spec.params || []).find((param) => param.name === "partition");
  if (menu && partition) partition.value = menu.value;
  if (before) before.finalize();
  const menus = figure.querySelector(".menus");
  menus.replaceChildren();
  const dark = isDark();
  views.set(name, await vegaEmbed(figure.querySelector(".plot"), spec, {
    mode: "vega-lite",
    renderer: "svg",
    bind: menus,
    config: chartConfig(dark, figure.clientWidth),
    tooltip: { theme: dark ? "dark" : "light" },
    actions: { export: true, source: false, compiled: false, editor: false },
    downloadFileName: name,
  }));
}

function drawAll() {
  for (const figure of document.querySelectorAll("[data-chart]")) {
    draw(figure).catch((error) => { figure.querySelector(".plot").textContent = String(error); });
  }
}

/** Open what an anchor leads to. */
function openTarget() {
  const target = document.getElementById(location.hash.slice(1));
  if (target && target.tagName === "DETAILS") {
    target.open = true;
    target.scrollIntoView();
  }
}

function start() {
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  document.querySelectorAll(".table").forEach(watchWidth);
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    drawAll();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = window.innerWidth;
  let waiting;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    if (window.innerWidth === width) return; // a phone's bars come and go
    waiting = setTimeout(() => { width = window.innerWidth; drawAll(); }, 200);
  });
  const menu = document.getElementById("partition-menu");
  if (menu) {
    menu.addEventListener("change", () => {
      for (const { view } of views.values()) view.signal("partition", menu.value).runAsync();
    });
  }
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", () => {
      navigator.clipboard.writeText(button.nextElementSibling.textContent);
      button.textContent = "Copied";
    });
  }
  window.addEventListener("hashchange", openTarget);
  openTarget();
  drawAll();
}

if (typeof document !== "undefined") start();
else module.exports = { sortRows };
