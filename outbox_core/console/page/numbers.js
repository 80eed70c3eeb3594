// The numbers at the head of every view: what waits, what is held, how fast it goes, who leads.

import { count, duration, plural, rate } from "./format.js";
import { h } from "./dom.js";
import { escaped } from "./parts.js";

const LATE_SECONDS = 60;

/** Return the tiles, from the answers to `status`, `statistics` of the last minutes and the last `events` of leaders; null where none came. */
export function numberTiles(status, numbers, led) {
  const database = status?.database.data ?? null;
  const latest = latestInterval(numbers?.data ?? null);
  return [...backlogTiles(database), ...flowTiles(latest, numbers), leaderTile(status, led?.data?.events[0] ?? null)];
}

function tile(key, title, value, below, kind = "") {
  return h("div", { class: `tile ${kind}`, key, "data-tile": key }, h("h2", {}, title), h("strong", {}, value), h("p", {}, below));
}

function backlogTiles(database) {
  if (database === null) return [tile("deliverable", "Deliverable", "–", "not known"), tile("held", "Held", "–", "not known")];
  const isWhole = database.pending <= database.head_rows;
  const about = isWhole && !database.is_estimate ? "" : "about ";
  const deliverable = Math.max(0, database.pending - database.held_at_head);
  const age = database.oldest_deliverable_seconds;
  const oldest = age === null ? "none waits" : `the oldest for ${duration(age)}`;
  return [
    tile("deliverable", "Deliverable", about + count(deliverable), oldest, age > LATE_SECONDS ? "problem" : ""),
    tile("held", "Held", isWhole ? count(database.held_at_head) : `≥ ${count(database.held_at_head)}`, heldBy(database), database.held_at_head > 0 ? "warning" : ""),
  ];
}

function heldBy({ holds, oldest_held_seconds: age }) {
  if (holds === null) return "there is no table of holds";
  const parts = [
    holds.records && plural(holds.records, "record"),
    holds.keys && plural(holds.keys, "key"),
    holds.topics.length && plural(holds.topics.length, "topic"),
  ].filter(Boolean);
  if (!parts.length) return "nothing is held";
  const since = age === null ? "" : `for up to ${duration(age)}, `;
  return `${since}by ${parts.join(", ")}`;
}

/** Return the newest point of statistics, if it is of the last minute. */
function latestInterval(data) {
  const columns = data?.columns;
  const last = (columns?.time.length ?? 0) - 1;
  if (last < 0 || data.to - columns.time[last] > LATE_SECONDS) return null;
  return Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[last]]));
}

function flowTiles(latest, numbers) {
  const silent = numbers?.unavailable ? "there is no history" : "no statistics for a minute";
  const failed = latest?.failed_per_second ?? null;
  return [
    tile("rate", "Published", rate(latest?.published_per_second ?? null), latest ? "in the last interval" : silent),
    tile("latency", "Latency p50 / p99", `${duration(latest?.latency_p50)} / ${duration(latest?.latency_p99)}`, latest ? "from create_time to Kafka" : silent, "pair"),
    tile("errors", "Failed attempts", rate(failed), failed === 0 ? "none fails" : latest ? "in the last interval" : silent, failed > 0 ? "warning" : ""),
  ];
}

function leaderTile(status, acquired) {
  const harvesters = status?.kafka.data?.harvesters ?? null;
  const leader = harvesters?.find(({ leads }) => leads) ?? null;
  if (harvesters !== null && leader === null) {
    const below = harvesters.length ? `${plural(harvesters.length, "harvester")}, none elected yet` : "no harvester is there";
    return tile("leader", "Leader", "none", below, "problem text");
  }
  const name = leader?.client_id ?? acquired?.actor ?? "–";
  const standing = harvesters ? ` · ${harvesters.length - 1} standing by` : " · Kafka does not tell";
  // Who has just been elected writes its event a moment later.
  const isKnown = acquired !== null && acquired.actor === name;
  const term = isKnown ? `term ${acquired.term}, for ${duration(secondsSince(acquired.at))}` : "term not known";
  return tile("leader", "Leader", escaped(name), term + standing, "text");
}

const secondsSince = (at) => Math.max(0, Math.floor((Date.now() - new Date(at).getTime()) / 1000));
