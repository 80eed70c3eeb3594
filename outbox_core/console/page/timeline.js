// Who led from when to when, and how it ended: a row for each harvester, and the same in words.

import { clock, duration } from "./format.js";
import { h, svg } from "./dom.js";

const ROW = 34;
const TOP = 22;
const MOST_ROWS = 8;
const ENDS = {
  handed_over: ["info", "handed over"],
  fenced: ["bad", "was fenced"],
  unknown: ["bad", "was fenced by its successor"],
};

/** Return the timeline of `data`, the answer to `timeline`, as a drawing; its words are those of `leaderEvents`. */
export function timelineDrawing(data) {
  const from = new Date(data.from).getTime();
  const to = new Date(data.to).getTime();
  const across = (at) => 100 * Math.min(1, Math.max(0, (new Date(at).getTime() - from) / (to - from)));
  const names = [...new Set([...data.leaderships].reverse().map(({ instance }) => instance))].slice(0, MOST_ROWS);
  const height = TOP + names.length * ROW + 4;
  return svg(
    "svg",
    { class: "timeline", height, role: "img", "aria-label": `Leaders from ${clock(data.from)} to ${clock(data.to)}; the list below tells the same` },
    gridOf(from, to, height),
    names.map((name, row) => rowOf(name, row, data.leaderships.filter(({ instance }) => instance === name), across)),
  );
}

function gridOf(from, to, height) {
  return [0, 25, 50, 75, 100].map((percent) => {
    const anchor = percent === 0 ? "start" : percent === 100 ? "end" : "middle";
    const at = new Date(from + ((to - from) * percent) / 100);
    return svg(
      "g",
      {},
      svg("line", { class: "grid", x1: `${percent}%`, x2: `${percent}%`, y1: 16, y2: height }),
      svg("text", { x: `${percent}%`, y: 11, "text-anchor": anchor }, at.toTimeString().slice(0, 5)),
    );
  });
}

function rowOf(name, row, leaderships, across) {
  const y = TOP + row * ROW;
  return svg(
    "g",
    {},
    svg("text", { class: "who", x: 0, y: y + 11 }, name),
    leaderships.map((one) => barOf(one, y + 16, across)),
  );
}

function barOf(one, y, across) {
  const start = one.from === null ? 0 : across(one.from);
  const end = one.to === null ? 100 : across(one.to);
  const width = Math.max(0.25, end - start);
  return svg(
    "g",
    {},
    svg("rect", { class: one.end === null ? "term" : "term other", x: `${start}%`, y, width: `${width}%`, height: 10, rx: 2 }, svg("title", {}, sentence(one))),
    one.end === null ? null : svg("circle", { class: one.end === "handed_over" ? "over" : "fence", cx: `${start + width}%`, cy: y + 5, r: 4.5 }, svg("title", {}, sentence(one))),
  );
}

function sentence(one) {
  const begin = one.from === null ? "before this window" : clock(one.from);
  const term = one.term === null ? "" : `, term ${one.term}`;
  const end = one.end === null ? "still leads" : `${ENDS[one.end][1]} at ${clock(one.to)}${one.reason ? `: ${one.reason}` : ""}`;
  return `${one.instance}${term}: from ${begin}; ${end}`;
}

/** Return the beginnings and ends of leaderships in words, newest first, as items of a list. */
export function leaderEvents(leaderships) {
  const told = [];
  for (const one of leaderships) {
    if (one.from !== null) told.push({ at: one.from, one, begins: true });
    if (one.end !== null) told.push({ at: one.to, one, begins: false });
  }
  told.sort((a, b) => new Date(b.at) - new Date(a.at) || Number(b.begins) - Number(a.begins));
  return told.map(({ at, one, begins }) => (begins ? beginOf(at, one) : endOf(at, one)));
}

function beginOf(at, one) {
  return item(`${one.leader_id}-begin`, at, "good", "leads", one, [one.term === null ? null : h("span", { class: "muted" }, ` term ${one.term}`)]);
}

function endOf(at, one) {
  const [kind, text] = ENDS[one.end];
  const led = one.from === null ? null : `, after ${duration((new Date(one.to) - new Date(one.from)) / 1000)}`;
  const unknown = one.end === "unknown" ? "it did not say why it ended: its process was killed, or cut off" : "";
  const reason = one.reason || unknown;
  return item(`${one.leader_id}-end`, at, kind, text, one, [h("span", { class: "muted" }, led), reason && h("div", {}, reason)]);
}

function item(key, at, kind, text, one, more) {
  return h(
    "li",
    { key },
    h("time", { datetime: at }, clock(at)),
    h("div", {}, h("span", { class: `kind ${kind}` }, h("span", { class: "name" }, one.instance), ` ${text}`), more),
  );
}
