// Charts of the last hours, drawn by uPlot (vendor/uplot), in the colours of the style sheet.

import { bytes, count, duration, rate } from "./format.js";
import { h } from "./dom.js";

/** The charts: series are columns of the statistics; colours are variables of console.css. */
export const CHARTS = [
  { id: "backlog", title: "Backlog", show: count, series: [["deliverable", "deliverable"], ["held", "held"]] },
  { id: "age", title: "Oldest deliverable", show: duration, series: [["age", "deliverable_age"]] },
  { id: "rate", title: "Published", show: rate, series: [["records", "published_per_second"]] },
  { id: "latency", title: "Latency", show: duration, series: [["p50", "latency_p50"], ["p99", "latency_p99"]] },
  { id: "errors", title: "Failed attempts", show: rate, series: [["failed", "failed_per_second"]] },
  { id: "bytes", title: "Bytes published", show: (size) => (size === null ? "–" : size === 0 ? "0" : `${bytes(size)}/s`), series: [["bytes", "bytes_per_second"]] },
];

const COLOURS = ["--chart-a", "--chart-b"];
const HEIGHT = 150;
const STEPS = {
  time: [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800],
  number: [1, 2, 5].flatMap((digit) => Array.from({ length: 13 }, (_, power) => digit * 10 ** (power - 1))).sort((a, b) => a - b),
};
const drawn = new WeakMap(); // element -> its plot

/** Return the elements of all charts; `draw` fills them. */
export function chartCards(columns) {
  return CHARTS.map((chart) =>
    h(
      "section",
      { class: "card", key: `chart-${chart.id}`, "aria-label": chart.title },
      h("div", { class: "card-head" }, h("h2", {}, chart.title), legend(chart, columns)),
      h("div", { class: "chart", "data-keep": true, "data-chart": chart.id, role: "img", "aria-label": summary(chart, columns) }),
    ),
  );
}

function legend(chart, columns) {
  return h(
    "p",
    { class: "legend" },
    chart.series.map(([name, column], index) =>
      h("span", { class: index ? "b" : "a", key: column }, `${name} `, h("b", { "data-value": column }, chart.show(latest(columns?.[column])))),
    ),
  );
}

function summary(chart, columns) {
  const parts = chart.series.map(([name, column]) => {
    const known = (columns?.[column] ?? []).filter((value) => value !== null);
    return known.length ? `${name}: now ${chart.show(known.at(-1))}, at most ${chart.show(Math.max(...known))}` : `${name}: nothing known`;
  });
  return `${chart.title}. ${parts.join("; ")}`;
}

const latest = (values) => values?.at(-1) ?? null;

/** Draw what is new on the charts in an element of the page; `data` is the answer to `statistics`. */
export function draw(root, data) {
  for (const element of root.querySelectorAll("[data-chart]")) {
    const chart = CHARTS.find(({ id }) => id === element.dataset.chart);
    const values = withGaps(data, chart.series.map(([, column]) => column));
    const width = Math.max(120, Math.floor(element.clientWidth));
    let plot = drawn.get(element);
    if (!plot) {
      plot = makePlot(chart, values, width, element);
      drawn.set(element, plot);
    } else {
      if (plot.width !== width) plot.setSize({ width, height: HEIGHT });
      plot.setData(values, false);
    }
    plot.setScale("x", { min: data.from, max: data.to });
  }
}

/** Forget all plots, so that the next `draw` makes them in the colours of the theme. */
export function forget(root) {
  for (const element of root.querySelectorAll("[data-chart]")) {
    drawn.get(element)?.destroy();
    drawn.delete(element);
  }
}

/** Return the columns for uPlot; a line must not join points between which nobody led. */
function withGaps(data, names) {
  const { time } = data.columns;
  const most = 2.5 * Math.max(data.step_seconds, 10);
  const columns = [[], ...names.map(() => [])];
  time.forEach((at, index) => {
    if (index > 0 && at - time[index - 1] > most) {
      columns[0].push(time[index - 1] + most / 2);
      names.forEach((_, column) => columns[column + 1].push(null));
    }
    columns[0].push(at);
    names.forEach((name, column) => columns[column + 1].push(data.columns[name][index]));
  });
  return columns;
}

function makePlot(chart, values, width, element) {
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--chart-grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const options = {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, sync: { key: "outbox" }, drag: { x: false, y: false }, points: { size: 6 } },
    padding: [8, 6, 0, 0],
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] } },
    axes: [
      { ...axis, size: 26, space: 70, values: (_, ticks) => ticks.map(hourAndMinute) },
      { ...axis, size: 62, space: 32, incrs: chart.show === duration ? STEPS.time : STEPS.number, values: (_, ticks) => ticks.map((value) => chart.show(value)) },
    ],
    series: [{}, ...chart.series.map(([name], index) => line(name, colour(COLOURS[index]), index))],
    hooks: { setCursor: [(plot) => showAt(plot, chart, element)] },
  };
  return new window.uPlot(options, values, element);
}

function line(label, stroke, index) {
  const fill = index === 0 ? stroke.replace(/^rgb\((.*)\)$/, "rgba($1, 0.12)") : undefined;
  return { label, stroke, fill, width: 1.75, spanGaps: false, points: { size: 4 } };
}

/** Show the values under the pointer in the legend, and else the latest. */
function showAt(plot, chart, element) {
  const { idx } = plot.cursor;
  chart.series.forEach(([, column], index) => {
    const shown = element.closest("section").querySelector(`[data-value="${column}"]`);
    const values = plot.data[index + 1];
    if (shown) shown.textContent = chart.show((idx === null || idx === undefined ? values.at(-1) : values[idx]) ?? null);
  });
}

const hourAndMinute = (at) => new Date(at * 1000).toTimeString().slice(0, 5);

/** Return a variable of the style sheet as the colour that it is in the theme of the moment. */
function colour(variable) {
  const probe = document.createElement("span");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
