// The last hours: charts, topics, and the timeline of leaders.

import { ask } from "./api.js";
import { chartCards, draw, forget } from "./charts.js";
import { h } from "./dom.js";
import { count, duration } from "./format.js";
import { button, card, name, pill, table, unavailable } from "./parts.js";
import { leaderEvents, timelineDrawing } from "./timeline.js";

export const title = "Overview";
export const everySeconds = 5;

const WINDOWS = [1, 3, 12, 24, 72, 168];
const MOST_EVENTS = 12;

const hoursOf = ({ params }) => (WINDOWS.includes(Number(params.get("hours"))) ? Number(params.get("hours")) : 3);

export async function load(context) {
  const hours = hoursOf(context);
  const [statistics, timeline] = await Promise.all([ask(context.outbox, "statistics", { hours }), ask(context.outbox, "timeline", { hours })]);
  return { statistics, timeline };
}

export function render(context, { statistics, timeline }) {
  return [windowChoice(context), charts(statistics), leaders(timeline), topics(context)];
}

/** Draw the charts, once their elements are in the page. */
export function drawn(root, context, { statistics }) {
  if (statistics.data) draw(root, statistics.data);
}

export const repaint = forget;

function windowChoice(context) {
  const chosen = hoursOf(context);
  const choices = WINDOWS.map((hours) =>
    button(hours < 48 ? `${hours} h` : `${hours / 24} d`, () => context.go("overview", { hours }), { key: `hours-${hours}`, "aria-pressed": String(hours === chosen) }),
  );
  return h("div", { class: "buttons", key: "window" }, h("span", { class: "muted", id: "window-label" }, "The last"), h("span", { class: "segments", role: "group", "aria-labelledby": "window-label" }, choices));
}

function charts(statistics) {
  if (statistics.unavailable) return unavailable(statistics.unavailable, "charts-unavailable");
  return h("div", { class: "charts", key: "charts" }, chartCards(statistics.data.columns));
}

function leaders(timeline) {
  if (timeline.unavailable) return null; // the charts say it: one history keeps both
  const { leaderships } = timeline.data;
  const events = leaderEvents(leaderships);
  const drawing = leaderships.length ? timelineDrawing(timeline.data) : h("p", { class: "empty" }, "Nobody led in this time.");
  return card("leaders", "Leaders, hand-overs and fences", null, drawing, h("ol", { class: "events", "aria-label": "Leaders" }, events.slice(0, MOST_EVENTS)), moreOf(events));
}

function moreOf(events) {
  const rest = events.slice(MOST_EVENTS);
  if (!rest.length) return null;
  return h("details", { key: "more" }, h("summary", {}, `${rest.length} earlier`), h("ol", { class: "events" }, rest));
}

function topics(context) {
  const database = context.status?.database.data;
  if (!database) return null;
  const columns = [
    ["Topic", ({ topic }) => h("a", { href: context.href("records", { topic }) }, name(topic))],
    ["Deliverable", ({ deliverable }) => count(deliverable), "number"],
    ["Oldest", (one) => duration(one.oldest_deliverable_seconds), "number"],
    ["Held", (one) => heldOf(context, one), "number"],
    ["Oldest held", (one) => duration(one.oldest_held_seconds), "number"],
    ["", ({ topic }) => (database.holds?.topics.includes(topic) ? pill("paused", "warning") : null), "tight"],
  ];
  const row = ({ topic }) => ({ key: topic });
  const among = `among the oldest ${count(database.head_rows)} records`;
  const shown = database.topics.length ? table("Topics", columns, database.topics, { row }) : h("p", { class: "empty" }, "No record waits.");
  return card("topics", "Topics", h("span", { class: "muted small" }, among), shown);
}

function heldOf(context, { topic, held }) {
  return held ? h("a", { href: context.href("holds", { topic }) }, count(held)) : "0";
}
