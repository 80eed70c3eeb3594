// Holds: grouped by what caused them, one by one on request; pauses; and what is done about them.

import { ask } from "./api.js";
import { heldRecordButtons, openAction, RELEASE, resumeButton } from "./actions.js";
import { h } from "./dom.js";
import { ago, clock, count, plural } from "./format.js";
import { button, card, escaped, name, pill, table, time, unavailable } from "./parts.js";

export const title = "Holds";
export const everySeconds = 4;

const FILTERS = ["topic", "key", "cause_pattern", "what"];
const WHAT = { record: "held records", key: "paused keys", topic: "paused topic" };
const MOST_SHOWN = 100;
const MOST_CHOSEN = 1000;
const chosen = new Set(); // ids of holds with a tick

const filterOf = (context) => Object.fromEntries(FILTERS.map((one) => [one, context.params.get(one)]).filter(([, value]) => value !== null));

export async function load(context) {
  const filter = filterOf(context);
  const isFiltered = Object.keys(filter).length > 0;
  const [groups, list] = await Promise.all([
    ask(context.outbox, "holds"),
    isFiltered ? ask(context.outbox, "holds/list", { ...filter, limit: MOST_SHOWN }) : null,
  ]);
  return { groups, list };
}

export function render(context, { groups, list }) {
  if (groups.unavailable) return unavailable(groups.unavailable);
  return [groupCard(context, groups.data), list?.data ? listCard(context, list.data) : null];
}

function groupCard(context, { causes, holds, head_rows: headRows }) {
  const beside = h("div", { class: "buttons" }, h("span", { class: "muted small" }, `${plural(holds, "hold")}; what waits is counted among the oldest ${count(headRows)} records`), pauseButton(context));
  const shown = causes.length ? causes.map((group) => groupOf(context, group)) : h("p", { class: "empty" }, "Nothing is held: every record may be published.");
  return card("causes", "Held, by cause", beside, shown);
}

function groupOf(context, group) {
  const { topic, what, cause, holds, waiting } = group;
  const key = `${what}/${topic}/${group.cause_pattern ?? cause}`;
  return h(
    "article",
    { class: "group", key },
    h("div", { class: "card-head" }, h("h3", {}, what === "topic" ? "Paused topic " : `${count(holds)} ${holds === 1 ? WHAT[what].replace(/s$/, "") : WHAT[what]} of `, name(topic)), h("div", { class: "buttons" }, groupButtons(context, group))),
    h("p", {}, cause ? escaped(cause) : h("span", { class: "muted" }, "no reason was given")),
    h("p", { class: "muted small" }, factsOf(context, group, waiting)),
  );
}

function factsOf(context, { topic, what, since, until, holds, records, dead_letter_asked: asked, cause_pattern: pattern }, waiting) {
  const when = holds > 1 && until !== since ? `from ${clock(since)} to ${clock(until)}` : `since ${clock(since)} (${ago(since)})`;
  const examples = (records ?? []).map((id) => [" ", h("a", { href: context.href("records", { id }), key: id }, id)]);
  return [
    `${plural(waiting, "record")} ${waiting === 1 ? "is" : "are"} kept by ${holds === 1 ? "it" : "them"} · ${when} · `,
    asked ? `${count(asked)} on the way to the dead-letter topic · ` : null,
    examples.length ? ["records", examples, " · "] : null,
    what === "topic" ? h("a", { href: context.href("records", { topic }) }, "its records") : h("a", { href: context.href("holds", { topic, what, cause_pattern: pattern }) }, "one by one"),
  ];
}

function groupButtons(context, { topic, what, cause_pattern: pattern, holds }) {
  if (what === "topic") return resumeButton(context, topic);
  if (what === "record") return heldRecordButtons(context, { matching: { topic, cause_pattern: pattern } }, `${plural(holds, "record")} of ${topic}`);
  if (!context.can("operate")) return null;
  const listed = async () => {
    const answer = await ask(context.outbox, "holds/list", { topic, what, cause_pattern: pattern, limit: MOST_CHOSEN });
    return { select: { holds: (answer.data?.holds ?? []).map(({ id }) => id) } };
  };
  return button("Resume", () => openAction({ outbox: context.outbox, ...RELEASE, title: "Resume these keys", body: listed, done: context.refresh }), { class: "primary", "aria-label": `Resume ${plural(holds, "key")} of ${topic}` });
}

function listCard(context, { holds, is_cut: isCut }) {
  for (const id of chosen) if (!holds.some((hold) => hold.id === id)) chosen.delete(id);
  const filter = filterOf(context);
  const columns = [
    [tickAll(context, holds), (hold) => tick(context, hold), "tight"],
    ["What", (hold) => whatOf(context, hold)],
    ["Topic", ({ topic }) => name(topic)],
    ["Key", ({ key }) => (key === null ? "–" : name(key))],
    ["Cause", ({ reason, error }) => escaped(error ?? reason) || "–"],
    ["Keeps", ({ waiting }) => count(waiting), "number"],
    ["Since", ({ since }) => time(since), "tight"],
  ];
  const row = ({ id }) => ({ key: id, class: id === context.params.get("hold") && "open" });
  const shown = holds.length ? table("Holds", columns, holds, { row }) : h("p", { class: "empty" }, "No hold matches (any more).");
  const all = h("a", { href: context.href("holds") }, "Show all causes only");
  return card("holds", titleOf(filter), all, actionBar(context, filter, holds), shown, isCut ? h("p", { class: "muted" }, `Only the first ${MOST_SHOWN} are shown; "all that match" means all.`) : null);
}

function titleOf({ topic, key, cause_pattern: pattern }) {
  return ["Holds", topic && ` of ${topic}`, key && `, key ${key}`, pattern && `: ${pattern}`].filter(Boolean).map(escaped).join("");
}

function tick(context, { id, record_id: record, topic }) {
  if (!context.can("operate")) return null;
  const change = (event) => {
    if (event.target.checked) chosen.add(id);
    else chosen.delete(id);
    context.redraw();
  };
  return h("input", { type: "checkbox", checked: chosen.has(id), onchange: change, "aria-label": `Choose the hold of ${record === null ? topic : `record ${record}`}` });
}

function tickAll(context, holds) {
  if (!context.can("operate") || !holds.length) return "";
  const all = holds.every(({ id }) => chosen.has(id));
  const change = () => {
    for (const { id } of holds) {
      if (all) chosen.delete(id);
      else chosen.add(id);
    }
    context.redraw();
  };
  return h("input", { type: "checkbox", checked: all, onchange: change, "aria-label": "Choose all that are shown" });
}

function whatOf(context, { what, record_id: record, dead_letter_asked: asked }) {
  const text = what === "record" ? h("a", { href: context.href("records", { id: record }) }, `record ${record}`) : what;
  return [text, asked ? [" ", pill("to dead letters", "accent")] : null];
}

/** Return what can be done to the ticked holds, or to all held records that match the filter. */
function actionBar(context, { topic, key, cause_pattern: pattern, what }, holds) {
  if (!context.can("operate") || !holds.length) return null;
  const ids = holds.map(({ id }) => id).filter((id) => chosen.has(id));
  if (ids.length) return h("div", { class: "buttons", key: "chosen" }, h("span", {}, `${plural(ids.length, "hold")} chosen:`), heldRecordButtons(context, { holds: ids }, "the chosen"));
  if (what === "key" || what === "topic") return h("p", { class: "muted small", key: "hint" }, "Choose holds to release them.");
  const matching = Object.fromEntries(Object.entries({ topic, key, cause_pattern: pattern }).filter(([, value]) => value));
  return h("div", { class: "buttons", key: "matching" }, h("span", {}, "All held records that match:"), heldRecordButtons(context, { matching }, "all that match"));
}

function pauseButton(context) {
  return context.can("operate") ? button("Pause a topic or key", () => openPause(context)) : null;
}

async function openPause(context) {
  const topics = h("datalist", { id: "pause-topics" });
  const keys = h("datalist", { id: "pause-keys" });
  const key = h("input", { list: "pause-keys", autocomplete: "off", spellcheck: "false", oninput: () => suggestKeys() });
  const topic = h("input", { list: "pause-topics", required: true, autocomplete: "off", spellcheck: "false", onchange: () => suggestKeys() });
  const suggestKeys = async () => {
    if (!topic.value) return;
    const answer = await ask(context.outbox, "keys", { topic: topic.value, starts: key.value }).catch(() => ({}));
    keys.replaceChildren(...(answer.data?.keys ?? []).map((one) => h("option", { value: one.key }, plural(one.waiting, "record"))));
  };
  openAction({
    outbox: context.outbox,
    action: "pause",
    title: "Pause a topic or key",
    explain: "Its records wait, in order, until it is resumed; everything else goes on. What has been sent by then is published.",
    verb: "Pause",
    fields: [
      h("label", { class: "field" }, h("span", {}, "Topic"), topic),
      h("label", { class: "field" }, h("span", {}, "Key (empty: the whole topic)"), key),
      topics,
      keys,
    ],
    body: () => (topic.value === "" ? null : key.value === "" ? { topic: topic.value } : { topic: topic.value, key: key.value }),
    done: context.refresh,
  });
  const answer = await ask(context.outbox, "topics").catch(() => ({}));
  topics.replaceChildren(...(answer.data?.topics ?? []).map((one) => h("option", { value: one.topic }, plural(one.waiting, "record"))));
}
