// The doctor's findings with their remedies, and the writers that hold back the floor.

import { ask } from "./api.js";
import { h } from "./dom.js";
import { ago, duration, plural } from "./format.js";
import { button, card, escaped, name, pill, remedyLine, table, unavailable } from "./parts.js";

export const title = "Findings";
export const everySeconds = 5;

const ORDER = ["problem", "warning", "ok"];
let wantsFresh = false;

export async function load(context) {
  const fresh = wantsFresh ? { fresh: 1 } : {};
  wantsFresh = false;
  const [findings, writers] = await Promise.all([ask(context.outbox, "findings", fresh), ask(context.outbox, "writers")]);
  return { findings, writers };
}

export function render(context, { findings, writers }) {
  return [
    findings.unavailable ? unavailable(findings.unavailable, "findings-unavailable") : findingsCard(context, findings.data),
    writers.unavailable ? unavailable(writers.unavailable, "writers-unavailable") : writersCard(writers.data),
  ];
}

function findingsCard(context, { is_running: isRunning, at, findings }) {
  const examine = () => {
    wantsFresh = true;
    context.refresh();
  };
  const when = isRunning ? "examining…" : at ? `examined ${ago(at)}` : "not examined yet";
  const beside = h("div", { class: "buttons" }, h("span", { class: "muted small" }, when), button("Examine now", examine, { disabled: isRunning }));
  const sorted = [...findings].sort((a, b) => ORDER.indexOf(a.verdict) - ORDER.indexOf(b.verdict));
  const troubles = sorted.filter(({ verdict }) => verdict !== "ok");
  const fine = sorted.filter(({ verdict }) => verdict === "ok");
  return card(
    "findings",
    troubles.length ? `${plural(troubles.length, "finding")} to look at` : "Findings",
    beside,
    troubles.length ? h("ul", {}, troubles.map(findingOf)) : h("p", { class: "empty" }, at ? "Everything is as it should be." : "The first examination takes some seconds."),
    fine.length ? h("details", { key: "fine", open: !troubles.length }, h("summary", {}, `${plural(fine.length, "thing")} examined and fine`), h("ul", {}, fine.map(findingOf))) : null,
  );
}

function findingOf({ subject, verdict, detail, remedy, unanswered }, index) {
  const kind = unanswered ? pill("no answer", "problem") : pill(verdict, verdict);
  return h("li", { class: "finding", key: `${subject}-${index}` }, h("div", {}, h("span", {}, kind)), h("div", {}, h("strong", {}, subject), h("p", {}, escaped(detail)), remedy ? remedyLine(remedy) : null));
}

function writersCard({ last_id: lastId, unusable, writers }) {
  const explain = `While a transaction that has drawn ids is open, what is behind it waits to be looked at once more. The last id drawn is ${lastId}.`;
  if (unusable) return card("writers", "Writers that hold back the floor", null, h("p", {}, "The floor is off: ", escaped(unusable)));
  const columns = [
    ["Writer", ({ who }) => name(who)],
    ["State", ({ state }) => state],
    ["Open for", (one) => duration(one.age_seconds), "number"],
    ["Ended by", ({ remedy }) => (remedy ? remedyLine(remedy) : "–")],
  ];
  const shown = writers.length ? table("Open writers", columns, writers, { row: ({ transaction }) => ({ key: transaction }) }) : h("p", { class: "empty" }, "No open transaction holds it back.");
  return card("writers", "Writers that hold back the floor", null, h("p", { class: "muted small" }, explain), shown);
}
