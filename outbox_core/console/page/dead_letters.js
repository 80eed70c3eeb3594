// Dead letters: what they are, why they failed, and stashing one anew after an edit.

import { ask } from "./api.js";
import { openAction } from "./actions.js";
import { h } from "./dom.js";
import { bytes, clock, count } from "./format.js";
import { button, card, escaped, headerList, name, pill, table, time, unavailable, valueBox, valuePreview } from "./parts.js";

export const title = "Dead letters";
export const everySeconds = 30;

const PAGE = 100;
const unfolded = new Map(); // "outbox/partition/offset" -> {letter, error}

export const load = (context) => ask(context.outbox, "dead-letters", { topic: context.params.get("topic"), limit: PAGE });

export function render(context, { data, unavailable: missing }) {
  return missing ? unavailable(missing) : lettersCard(context, data);
}

function lettersCard(context, { dead_letter_topic: deadLetterTopic, letters, is_cut: isCut, left_out: leftOut }) {
  const columns = [
    ["Offset", (letter) => unfoldButton(context, letter), "tight"],
    ["Meant for", (letter) => name(letter.original_topic)],
    ["Key", ({ key }) => name(key)],
    ["Error", ({ error }) => escaped(error ?? "")],
    ["Value", ({ value }) => valuePreview(value), "wide"],
    ["Since", ({ at }) => time(at), "tight"],
    ["", ({ restashed, foreign_outbox: foreign }) => (restashed ? pill("restashed", "ok") : foreign ? pill("of another outbox", "warning") : null), "tight"],
  ];
  const rows = {
    row: (letter) => ({ key: place(context, letter), class: unfolded.has(place(context, letter)) && "open" }),
    below: (letter, width) => (unfolded.has(place(context, letter)) ? detailRow(context, letter, width) : null),
  };
  const shown = letters.length ? table("Dead letters", columns, letters, rows) : h("p", { class: "empty" }, leftOut ? "No dead letter could be read." : "There are no dead letters.");
  const beside = h("div", { class: "buttons" }, filterNote(context), h("span", { class: "muted small" }, "in ", name(deadLetterTopic)), button("Read again", () => context.refresh()));
  return card("letters", "Dead letters, the newest first", beside, shown, isCut ? h("p", { class: "muted" }, cutNote(letters, leftOut)) : null);
}

const cutNote = (letters, leftOut) => [letters.length ? `Only the newest ${count(letters.length)} are shown` : "Some are not shown", leftOut].filter(Boolean).join(": ") + ".";

function filterNote(context) {
  const topic = context.params.get("topic");
  return topic ? h("span", {}, "meant for ", name(topic), " ", h("a", { href: context.href("dead-letters") }, "show all")) : null;
}

const place = (context, { partition, offset }) => `${context.outbox}/${partition}/${offset}`;

function unfoldButton(context, letter) {
  const key = place(context, letter);
  const isOpen = unfolded.has(key);
  const toggle = () => {
    if (isOpen) unfolded.delete(key);
    else readDetail(context, letter);
    context.redraw();
  };
  const text = `${letter.partition}:${letter.offset}`;
  return button(`${isOpen ? "▾" : "▸"} ${text}`, toggle, { class: "link", "aria-expanded": String(isOpen), "aria-label": `Dead letter ${text}` });
}

async function readDetail(context, letter) {
  const detail = { letter: null, error: null };
  unfolded.set(place(context, letter), detail);
  try {
    const answer = await ask(context.outbox, `dead-letters/${letter.partition}/${letter.offset}`);
    detail.letter = answer.data;
    detail.error = answer.unavailable?.reason ?? null;
  } catch (error) {
    detail.error = error.message;
  }
  context.redraw();
}

function detailRow(context, letter, width) {
  const key = place(context, letter);
  const { letter: whole, error } = unfolded.get(key);
  const shown = whole ? detailOf(context, whole, letter) : h("p", { class: "muted" }, error ?? "Asking…");
  return h("tr", { role: "row", class: "detail", key: `${key}-detail` }, h("td", { role: "cell", colspan: width }, shown));
}

function detailOf(context, whole, { restashed }) {
  const again = restashed ? h("p", {}, `Stashed anew at ${clock(restashed.at)} by `, name(restashed.by)) : null;
  return h(
    "div",
    { class: "detail-grid" },
    valueBox(place(context, whole), whole.value, context.redraw),
    h(
      "div",
      { class: "stack" },
      h("dl", { class: "pairs" }, h("dt", {}, "Record"), h("dd", {}, whole.record_id ?? "not known"), h("dt", {}, "Size"), h("dd", {}, bytes(whole.size_bytes))),
      whole.foreign_outbox ? h("p", {}, "Not of this outbox: ", name(whole.foreign_outbox), " is said to have written it. Whoever may write to the topic can make such a letter.") : null,
      h("h3", {}, "Why it is here"),
      h("p", {}, escaped(whole.error ?? "not known")),
      h("h3", {}, "Headers"),
      headerList(whole),
      again,
      context.can("restash") ? h("div", { class: "buttons" }, restashButton(context, whole)) : null,
    ),
  );
}

function restashButton(context, letter) {
  if (!letter.is_whole) return h("p", { class: "muted" }, "Too large to be edited here; `outbox restash` stashes it as it is.");
  return button("Edit and restash", () => openRestash(context, letter), { class: "primary" });
}

/** Open the form of a record that a dead letter becomes. What is not touched goes back exactly as it was. */
function openRestash(context, letter) {
  const topic = h("input", { required: true, value: letter.original_topic ?? "", spellcheck: "false" });
  const key = h("input", { value: letter.key ?? "", spellcheck: "false" });
  const hasKey = h("input", { type: "checkbox", checked: letter.key !== null });
  const value = valueField(letter.value);
  const headers = headerFields(letter.headers);
  openAction({
    outbox: context.outbox,
    action: "restash",
    title: `Stash dead letter ${letter.partition}:${letter.offset} anew`,
    explain: "A new record is written into the outbox, as below, and is published like any other: behind what its key has published since. The dead letter itself stays where it is.",
    verb: "Stash anew",
    fields: [
      h("label", { class: "field" }, h("span", {}, "Topic"), topic),
      h("label", { class: "check" }, hasKey, "has a key"),
      h("label", { class: "field" }, h("span", {}, "Key"), key),
      value.element,
      headers.element,
    ],
    body: () => ({
      letter: { partition: letter.partition, offset: letter.offset },
      record: {
        topic: topic.value,
        key: hasKey.checked ? key.value : null,
        partition: letter.original_partition ?? null,
        value: value.read(),
        headers: headers.read(),
      },
    }),
    done: context.refresh,
  });
}

/** Return the fields for headers, and how they are read: a row each, and a button for one more. */
function headerFields(headers) {
  const rows = [];
  const list = h("div", { class: "stack" });
  const add = ([header, content]) => {
    const name = h("input", { value: header, "aria-label": "Name of the header", spellcheck: "false" });
    const value = valueField(content, (attributes) => h("input", { ...attributes, "aria-label": `Value of the header ${header}` }));
    const row = { read: () => [name.value, value.read()] };
    const remove = () => {
      rows.splice(rows.indexOf(row), 1);
      element.remove();
      list.dispatchEvent(new Event("change", { bubbles: true }));
    };
    const element = h("div", { class: "header-row" }, name, value.element, button("Remove", remove, { "aria-label": `Remove the header ${header}` }));
    rows.push(row);
    list.append(element);
  };
  headers.forEach(add);
  const more = button("Add a header", () => add(["", { kind: "text", text: "" }]));
  return { element: h("fieldset", { class: "stack" }, h("legend", { class: "muted small" }, "Headers"), list, h("div", {}, more)), read: () => rows.map((row) => row.read()) };
}

/** Return what the API takes for a value as it gave it. */
function sent({ kind, text, base64 }) {
  if (kind === "tombstone") return null;
  return kind === "binary" ? { base64 } : { text };
}

/** Return the field for a value, and how it is read. A text area changes line breaks: untouched text is sent as it came. */
function valueField(value, makeField = valueArea) {
  if (value.kind === "tombstone" || value.kind === "binary") {
    const text = value.kind === "tombstone" ? "null: it has no value." : `binary, ${bytes(value.size_bytes)}: goes back as it is.`;
    return { element: h("p", { class: "muted" }, text), read: () => sent(value) };
  }
  const area = makeField({ spellcheck: "false" });
  area.value = value.text;
  const untouched = area.value;
  return { element: makeField === valueArea ? h("label", { class: "field" }, h("span", {}, "Value"), area) : area, read: () => ({ text: area.value === untouched ? value.text : area.value }) };
}

const valueArea = (attributes) => h("textarea", { class: "code", ...attributes });
