// Pending records: search, pages, and one record with its value, headers and hold.

import { addressOf, ask } from "./api.js";
import { heldRecordButtons, openAction } from "./actions.js";
import { byId, h } from "./dom.js";
import { bytes, count, duration } from "./format.js";
import { button, card, escaped, headerList, name, pill, table, time, unavailable, valueBox, valuePreview } from "./parts.js";

export const title = "Records";
export const everySeconds = 5;

const FILTERS = [
  ["topic", "Topic"],
  ["key", "Key"],
  ["id", "Id"],
  ["header", "Header"],
  ["header_value", "Header's value"],
];
const PAGE = 50;
const unfolded = new Map(); // "outbox/id" -> {record, error}: the records whose details are shown

export async function load(context) {
  const asked = Object.fromEntries(FILTERS.map(([filter]) => [filter, context.params.get(filter)]));
  const [page, topics] = await Promise.all([
    ask(context.outbox, "records", { ...asked, after: context.params.get("after"), limit: PAGE }),
    ask(context.outbox, "topics"),
  ]);
  return { page, topics: topics.data?.topics ?? [] };
}

export function render(context, { page, topics }) {
  return [searchCard(context, topics), page.unavailable ? unavailable(page.unavailable) : resultCard(context, page.data)];
}

export function drawn(root, context) {
  if (!context.params.has("search")) return;
  context.params.delete("search");
  focusSearch();
}

/** Put the cursor into the search. */
export function focusSearch() {
  byId("search-key")?.focus();
}

function searchCard(context, topics) {
  const search = (event) => {
    event.preventDefault();
    context.go("records", Object.fromEntries(new FormData(event.target)));
  };
  const clear = () => {
    byId("search").querySelectorAll("input").forEach((field) => (field.value = ""));
    context.go("records");
  };
  return h(
    "form",
    { class: "card", id: "search", key: `search-${context.outbox}`, role: "search", "aria-label": "Pending records", onsubmit: search },
    h("div", { class: "fields" }, FILTERS.map(([filter, label]) => field(context, filter, label)), h("div", { class: "buttons" }, h("button", { type: "submit", class: "primary" }, "Search"), button("Clear", clear))),
    h("datalist", { id: "waiting-topics" }, topics.map(({ topic }) => h("option", { value: topic, key: topic }))),
  );
}

function field(context, filter, label) {
  const attributes = { id: `search-${filter}`, name: filter, value: context.params.get(filter) ?? "", autocomplete: "off", spellcheck: "false" };
  if (filter === "topic") attributes.list = "waiting-topics";
  if (filter === "id") Object.assign(attributes, { inputmode: "numeric", pattern: "-?[0-9]+", title: "a whole number" });
  return h("label", { class: "field" }, h("span", {}, label), h("input", attributes));
}

function resultCard(context, { records, next_after: next, is_end: isEnd, searched }) {
  const columns = [
    ["Id", (record) => unfoldButton(context, record), "tight"],
    ["Topic", ({ topic }) => name(topic)],
    ["Key", ({ key }) => h("div", { class: "clip" }, name(key))],
    ["Value", ({ value }) => valuePreview(value), "wide"],
    ["Size", (record) => bytes(record.size_bytes), "number tight"],
    ["Age", (record) => duration(record.age_seconds), "number tight"],
    ["State", (record) => stateOf(context, record), "tight"],
  ];
  const isOpen = ({ id }) => unfolded.has(place(context, id));
  const rows = { row: (record) => ({ key: record.id, class: isOpen(record) && "open" }), below: (record, width) => (isOpen(record) ? detailRow(context, record, width) : null) };
  const shown = records.length ? table("Pending records", columns, records, rows) : h("p", { class: "empty" }, emptyText(context, isEnd, searched));
  return card("records", "Pending records, the oldest first", h("span", { class: "muted small", role: "status" }, `${count(records.length)} on this page`), shown, pages(context, next));
}

function emptyText(context, isEnd, searched) {
  if (!isEnd) return `None of these ${count(searched)} records matches; the search can go on.`;
  const isSearch = FILTERS.some(([filter]) => context.params.get(filter));
  return isSearch ? "No pending record matches: it is published, or never was there." : "No record waits: everything is published.";
}

function pages(context, next) {
  const given = Object.fromEntries(context.params);
  delete given.after;
  const first = context.params.has("after") ? button("Oldest", () => context.go("records", given), { key: "first" }) : null;
  const more = next === null ? null : button("Next page", () => context.go("records", { ...given, after: next }), { key: "next" });
  return h("div", { class: "buttons", key: "pages" }, first, more);
}

function stateOf(context, { id, topic, hold, is_marked: isMarked }) {
  if (hold === null) return isMarked ? pill("publishing", "accent") : pill("waiting");
  const label = { record: "held", key: "key held", topic: "topic paused" }[hold.what];
  return h("a", { class: "pill warning", title: hold.cause, href: context.href("holds", { topic, hold: hold.id }), "aria-label": `Record ${id}: ${label}. ${hold.cause}` }, label);
}

const place = (context, id) => `${context.outbox}/${id}`;

function unfoldButton(context, { id }) {
  const isOpen = unfolded.has(place(context, id));
  const toggle = () => {
    if (isOpen) unfolded.delete(place(context, id));
    else readDetail(context, id);
    context.redraw();
  };
  return button(`${isOpen ? "▾" : "▸"} ${id}`, toggle, { class: "link", "aria-expanded": String(isOpen), "aria-label": `Record ${id}` });
}

async function readDetail(context, id) {
  const detail = { record: null, heldRecord: null, error: null };
  unfolded.set(place(context, id), detail);
  try {
    const answer = await ask(context.outbox, `records/${id}`);
    detail.record = answer.data;
    detail.error = answer.unavailable?.reason ?? null;
    if (answer.data?.hold?.what === "record") detail.heldRecord = await heldRecordOf(context, answer.data);
  } catch (error) {
    detail.error = error.message;
  }
  context.redraw();
}

/** Return the id of the record whose hold keeps this one: its own, or one before it in its key. */
async function heldRecordOf(context, { topic, key, id, hold }) {
  if (key === null) return id;
  const { data } = await ask(context.outbox, "holds/list", { topic, key, what: "record" });
  return data?.holds.find((one) => one.id === hold.id)?.record_id ?? null;
}

function detailRow(context, record, width) {
  const { record: whole, heldRecord, error } = unfolded.get(place(context, record.id));
  const hold = record.hold && { ...record.hold, record_id: heldRecord };
  const shown = whole ? detailOf(context, whole, { ...record, hold }) : h("p", { class: "muted" }, error ?? "Asking…");
  return h("tr", { role: "row", class: "detail", key: `${record.id}-detail` }, h("td", { role: "cell", colspan: width }, shown));
}

/** Return a record in full. Its state is taken from the page of records, which is newer. */
function detailOf(context, whole, { hold, age_seconds: age }) {
  const download = h("a", { href: addressOf(context.outbox, `records/${whole.id}/value`), download: `record-${whole.id}` }, "Download");
  const facts = [
    ["Created", h("span", {}, time(whole.create_time), ` (${duration(age)} ago)`)],
    ["Partition", whole.partition ?? "by its key"],
    ["Size", bytes(whole.size_bytes)],
  ];
  return h(
    "div",
    { class: "detail-grid" },
    valueBox(place(context, whole.id), whole.value, context.redraw, download),
    h(
      "div",
      { class: "stack" },
      h("dl", { class: "pairs" }, facts.map(([label, value]) => [h("dt", {}, label), h("dd", {}, value)])),
      h("h3", {}, "Headers"),
      headerList(whole),
      hold ? [h("h3", {}, "Kept by"), h("p", {}, h("a", { href: context.href("holds", { topic: whole.topic, hold: hold.id }) }, whatHolds(whole, hold)), `: ${escaped(hold.cause)}`)] : null,
      h("div", { class: "buttons" }, recordButtons(context, whole, hold)),
    ),
  );
}

function whatHolds({ id, key, topic }, { what, record_id: held }) {
  if (what === "record") return held === id ? "the hold of this record" : `the hold of ${held === null ? "a record" : `record ${held}`} before it in its key`;
  return what === "key" ? `the hold of key ${escaped(key ?? "")}` : `the pause of topic ${escaped(topic)}`;
}

function recordButtons(context, { id }, hold) {
  if (hold?.what === "record" && hold.record_id === id) return heldRecordButtons(context, { records: [id] }, `record ${id}`);
  if (hold !== null || !context.can("operate")) return null;
  const open = () =>
    openAction({
      outbox: context.outbox,
      action: "pause",
      title: `Hold record ${id}`,
      explain: "The record, and with its key all that follow it, waits until the hold is released. If it has been sent by then it is published all the same.",
      verb: "Hold",
      body: () => ({ record: id }),
      done: context.refresh,
    });
  return button("Hold this record", open, { key: "hold" });
}
