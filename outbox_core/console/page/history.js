// What people and harvesters did: every hold and release with who and why, every change of leader.

import { ask } from "./api.js";
import { h } from "./dom.js";
import { button, card, escaped, name, time, unavailable } from "./parts.js";

export const title = "History";
export const everySeconds = 10;

const WINDOWS = [1, 24, 168, 720];
const GROUPS = {
  all: ["Everything", null],
  leaders: ["Leaders", "leader_acquired,leader_handed_over,leader_fenced"],
  holds: ["Holds", "held,released,skipped"],
  letters: ["Dead letters", "dead_letter_asked,dead_letter_refused,dead_lettered,restashed"],
};
const KINDS = {
  leader_acquired: ["good", "leads"],
  leader_handed_over: ["info", "handed over"],
  leader_fenced: ["bad", "was fenced"],
  held: ["note", "held"],
  released: ["good", "released"],
  skipped: ["bad", "deleted for good"],
  dead_letter_asked: ["info", "asked for the dead-letter topic"],
  dead_letter_refused: ["bad", "the dead-letter topic refused"],
  dead_lettered: ["info", "sent to the dead-letter topic"],
  restashed: ["good", "stashed anew"],
};
const LIMIT = 300;

const hoursOf = ({ params }) => (WINDOWS.includes(Number(params.get("hours"))) ? Number(params.get("hours")) : 24);
const groupOf = ({ params }) => (Object.hasOwn(GROUPS, params.get("kinds") ?? "") ? params.get("kinds") : "all");

export const load = (context) => ask(context.outbox, "events", { hours: hoursOf(context), kinds: GROUPS[groupOf(context)][1], limit: LIMIT });

export function render(context, { data, unavailable: missing }) {
  return [choices(context), missing ? unavailable(missing) : eventsCard(context, data)];
}

function choices(context) {
  const hours = hoursOf(context);
  const group = groupOf(context);
  const windows = WINDOWS.map((one) => button(one < 48 ? `${one} h` : `${one / 24} d`, () => context.go("history", { hours: one, kinds: group }), { key: `w${one}`, "aria-pressed": String(one === hours) }));
  const groups = Object.entries(GROUPS).map(([key, [text]]) => button(text, () => context.go("history", { hours, kinds: key }), { key, "aria-pressed": String(key === group) }));
  return h(
    "div",
    { class: "buttons", key: "choices" },
    h("span", { class: "segments", role: "group", "aria-label": "The last" }, windows),
    h("span", { class: "segments", role: "group", "aria-label": "Kinds" }, groups),
  );
}

function eventsCard(context, { events, is_cut: isCut }) {
  const shown = events.length ? h("ol", { class: "events" }, events.map((event) => eventOf(context, event))) : h("p", { class: "empty" }, "Nothing happened in this time.");
  return card("events", "What happened", null, shown, isCut ? h("p", { class: "muted" }, `Only the latest ${LIMIT} are shown.`) : null);
}

function eventOf(context, event) {
  const [kind, text] = KINDS[event.kind] ?? ["", event.kind];
  const isLeader = event.kind.startsWith("leader_");
  const term = event.term === null ? null : h("span", { class: "muted" }, ` term ${event.term}`);
  return h(
    "li",
    { key: event.id },
    time(event.at),
    h(
      "div",
      {},
      h("span", { class: `kind ${kind}` }, isLeader ? [name(event.actor), ` ${text}`] : [text, ": ", targetOf(context, event)]),
      isLeader ? term : h("span", { class: "muted" }, " by ", name(event.actor)),
      event.reason ? h("div", {}, escaped(event.reason)) : null,
    ),
  );
}

function targetOf(context, { topic, key, record_id: record }) {
  if (topic === null) return null;
  const target = record === null ? null : [h("a", { href: context.href("records", { id: record }) }, `record ${record}`), " of "];
  return [target, name(topic), key === null ? null : [", key ", name(key)]];
}
