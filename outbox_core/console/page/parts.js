// Parts that several views use: cards, tables, names, values, copying.

import { bytes, clock, count, hexDump, indentJson } from "./format.js";
import { h } from "./dom.js";

/** Return a card with a heading, and buttons or links beside it. */
export function card(key, title, beside, ...children) {
  return h("section", { class: "card", key, "aria-labelledby": `${key}-title` }, h("div", { class: "card-head" }, h("h2", { id: `${key}-title` }, title), beside), children);
}

/**
 * Return a table. Columns are [title, cell(row), class]; `row(item)` returns the attributes of its row with a `key`.
 *
 * Roles are written out, because the narrow layout makes blocks of the elements, and blocks have none.
 */
export function table(label, columns, items, { row, below = () => null }) {
  const head = h("tr", { role: "row" }, columns.map(([title, , kind]) => h("th", { role: "columnheader", scope: "col", class: kind }, title)));
  const body = items.flatMap((item) => [rowOf(columns, item, row(item)), below(item, columns.length)]);
  return h("table", { class: "table", role: "table", "aria-label": label }, h("thead", { role: "rowgroup" }, head), h("tbody", { role: "rowgroup" }, body));
}

function rowOf(columns, item, attributes) {
  return h(
    "tr",
    { role: "row", ...attributes },
    columns.map(([title, cell, kind]) => {
      const label = typeof title === "string" ? title : null;
      return h("td", { role: "cell", class: kind, "data-label": label || null }, cell(item));
    }),
  );
}

/** Characters that move or hide others are shown as escapes: a name must look like what it is. */
// eslint-disable-next-line no-control-regex
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Return the name of something that people or programs chose: a topic, key, header, harvester. */
export function name(text) {
  if (text === null || text === undefined) return h("span", { class: "muted" }, "none");
  if (text === "") return h("span", { class: "muted" }, "empty");
  return h("span", { class: "name" }, escaped(text));
}

/** Return text in one line, its hidden characters as escapes. */
export const escaped = (text) => text.replace(HIDDEN, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** Return a time with its full form as a tooltip. */
export const time = (at) => (at ? h("time", { datetime: at, title: at }, clock(at)) : "–");

/** Return the verdict, state or kind of something as a word in a frame. */
export const pill = (text, kind = "") => h("span", { class: `pill ${kind}` }, text);

/** Return a button. */
export const button = (text, onclick, attributes = {}) => h("button", { type: "button", onclick, ...attributes }, text);

/** Return what a view says if a half of the world is away, or a table is missing. */
export function unavailable({ service, reason, remedy }, key = "unavailable") {
  const what = service === "kafka" ? "Kafka does not answer" : "The database does not tell";
  return h("div", { class: "notice problem", role: "group", key }, h("strong", {}, what), h("p", {}, reason), remedy ? remedyLine(remedy) : null);
}

const SQL = /^[A-Z]{2,}\b/; // a statement, in which backquotes are part of somebody's name

/** Return a remedy with a button that copies its command, or all of it: no line break, which would run it when pasted. */
export function remedyLine(remedy) {
  const isSql = SQL.test(remedy);
  const command = ((!isSql && /`([^`]+)`/.exec(remedy)?.[1]) || remedy).replace(/[\p{Cc}\p{Cf}\u2028\u2029]/gu, " ");
  const parts = isSql ? [remedy] : remedy.split("`");
  const shown = parts.map((part, index) => (index % 2 || parts.length === 1 ? h("code", {}, escaped(part)) : part));
  return h("div", { class: "remedy" }, h("span", {}, shown), copyButton(command, `Copy: ${command}`));
}

/** Return a button that copies text. */
export function copyButton(text, label = "Copy") {
  return button("Copy", (event) => copy(event.currentTarget, text), { "aria-label": label });
}

async function copy(pressed, text) {
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
  } catch {
    pressed.textContent = "Not allowed"; // plain HTTP to another host: browsers give no clipboard
  }
}

/** Return the short form of a value, for a table. */
export function valuePreview(value) {
  if (value.kind === "tombstone") return pill("tombstone");
  if (value.kind === "binary") return h("span", { class: "muted" }, `binary, ${bytes(value.size_bytes)}`);
  const short = value.text.length > 120 ? `${value.text.slice(0, 120)}…` : value.text;
  return h("div", { class: "clip" }, name(short));
}

const shownAs = new Map(); // key of a value -> how its user wants to see it

/** Return a value with the choice of how it is shown; `key` tells values apart, `redraw` shows it anew. */
export function valueBox(key, value, redraw, more = null) {
  if (value.kind === "tombstone") return h("p", { class: "muted" }, "A tombstone: no value.");
  const ways = waysOf(value);
  const chosen = ways.find(([way]) => way === shownAs.get(key)) ?? ways[0];
  const choose = (way) => () => {
    shownAs.set(key, way);
    redraw();
  };
  const segments = ways.map(([way, title]) => button(title, choose(way), { key: way, "aria-pressed": String(way === chosen[0]) }));
  return h(
    "div",
    { class: "stack", key: `value-${key}` },
    h("div", { class: "buttons" }, h("span", { class: "segments", role: "group", "aria-label": "Show the value as" }, segments), copyButton(chosen[2](), "Copy the value"), more),
    h("pre", { class: "value", tabindex: 0, "aria-label": "Value" }, chosen[2]()),
    value.is_cut ? h("p", { class: "muted small" }, `Only the beginning of ${bytes(value.size_bytes)}.`) : null,
  );
}

/** Return the ways to show a value: name, title, text. JSON is only ever indented; its tokens stay as they are stored. */
function waysOf(value) {
  if (value.kind === "binary") return [["hex", "Hex", () => hexDump(value.base64)]];
  const stored = ["stored", "As stored", () => value.text];
  const hex = ["hex", "Hex", () => hexDump(toBase64(value.text))];
  return value.kind === "json" ? [["json", "JSON", () => indentJson(value.text) ?? value.text], stored, hex] : [stored, hex];
}

function toBase64(text) {
  return btoa(Array.from(new TextEncoder().encode(text), (code) => String.fromCharCode(code)).join(""));
}

/** Return a value's text in one line, for headers. */
export function headerValue(value) {
  if (value.kind === "tombstone") return h("span", { class: "muted" }, "null");
  return value.kind === "binary" ? h("code", {}, hexDump(value.base64)) : name(value.text);
}

/** Return the headers of a record or letter, of which the first are known. */
export function headerList({ headers, header_count: number }) {
  if (!headers.length) return h("p", { class: "muted" }, "No headers.");
  const list = h("dl", { class: "pairs" }, headers.map(([title, value]) => [h("dt", {}, name(title)), h("dd", {}, headerValue(value))]));
  if (number <= headers.length) return list;
  return h("div", { class: "stack" }, list, h("p", { class: "muted" }, `Only the first ${count(headers.length)} of ${count(number)}.`));
}
