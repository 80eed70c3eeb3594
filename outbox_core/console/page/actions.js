// Actions: a dialog that tells what will happen to how many records, asks for the reason, and does it.

import { act, ApiError } from "./api.js";
import { byId, h, update } from "./dom.js";
import { button, name, remedyLine } from "./parts.js";

const RESULT_SECONDS = 12;

/**
 * Open the dialog of an action.
 *
 * Args: `outbox`, `action` (its name in the API), `title`, `explain` (what it means), `verb` (the button's text),
 * `danger` (it cannot be undone), `fields` (elements to fill in), `body()` (the request without reason; null while the
 * fields are incomplete; may be a promise), `noun` (what is counted), `done()` (called when it was done).
 */
export function openAction(spec) {
  const state = { force: false, preview: null, problem: null, asked: 0, isBusy: false };
  const form = h("form", { onsubmit: (event) => submit(event, spec, state), onchange: ({ target }) => changed(target, spec, state) });
  byId("dialog").replaceChildren(form);
  draw(spec, state);
  byId("dialog").showModal();
  form.querySelector("input, select, textarea")?.focus();
  tell(spec, state);
}

/** Tell anew what would happen. "All the same" was said of what the fields had before: it does not hold for others. */
function changed(field, spec, state) {
  if (field.id === "reason") return;
  if (field.id !== "force") state.force = false;
  tell(spec, state);
}

function draw(spec, state) {
  update(
    byId("dialog").querySelector("form"),
    h("h2", { id: "dialog-title" }, spec.title),
    h("p", {}, spec.explain),
    spec.fields ? h("div", { class: "stack", key: "fields", "data-keep": true }) : null,
    previewOf(spec, state),
    h(
      "label",
      { class: "field" },
      h("span", {}, "Reason, for the history (required)"),
      h("textarea", { id: "reason", required: true, maxlength: 500, rows: 2, "aria-describedby": "preview" }),
    ),
    h(
      "div",
      { class: "buttons" },
      button("Cancel", () => byId("dialog").close(), { key: "cancel" }),
      h("button", { type: "submit", key: "do", class: spec.danger ? "danger" : "primary", disabled: !mayDo(state) }, spec.verb),
    ),
  );
  const place = byId("dialog").querySelector("[data-keep]");
  if (place && !place.hasChildNodes()) place.append(...[spec.fields].flat());
}

const mayDo = (state) => !state.isBusy && state.preview !== null && state.preview.count > 0;

function previewOf(spec, state) {
  const { problem, preview } = state;
  const lines = [];
  if (problem) {
    lines.push(h("p", {}, problem.message), problem.remedy && remedyLine(problem.remedy), suggestionsOf(problem), forceOf(problem, state));
  } else if (preview) {
    lines.push(h("p", {}, h("strong", {}, preview.text)), preview.count === 0 ? h("p", { class: "muted" }, "Nothing is there to do it to (any more).") : null, forceOf(null, state));
  } else {
    lines.push(h("p", { class: "muted" }, state.asked ? "Looking what would happen…" : "Fill in the fields to see what would happen."));
  }
  return h("div", { id: "preview", key: "preview", class: problem ? "preview problem" : "preview", role: "status", "aria-live": "polite" }, lines);
}

function suggestionsOf(problem) {
  const { suggestions = [] } = problem.body;
  return suggestions.length ? h("p", {}, "Did you mean ", suggestions.flatMap((text, index) => [index ? ", " : null, name(text)]), "?") : null;
}

function forceOf(problem, state) {
  if (!state.force && problem?.code !== "unknown_target" && problem?.code !== "already_restashed") return null;
  const set = (event) => {
    state.force = event.target.checked;
  };
  return h("label", { class: "check", key: "force" }, h("input", { type: "checkbox", id: "force", checked: state.force, onchange: set }), "Do it all the same");
}

/** Ask what would happen, and show it. An answer that is overtaken by another question is dropped. */
async function tell(spec, state) {
  const number = ++state.asked;
  state.preview = null;
  if (!state.force) state.problem = null;
  try {
    const body = await spec.body();
    if (number !== state.asked) return;
    if (body === null) {
      state.asked = 0;
    } else {
      draw(spec, state);
      const answer = await act(spec.outbox, spec.action, { ...body, ...forced(state), dry_run: true });
      if (number !== state.asked) return;
      Object.assign(state, { preview: answer, problem: null });
    }
  } catch (error) {
    if (number !== state.asked) return;
    state.problem = asProblem(error);
  }
  draw(spec, state);
}

const forced = (state) => (state.force ? { force: true } : {});

async function submit(event, spec, state) {
  event.preventDefault();
  if (!mayDo(state)) return;
  state.isBusy = true;
  draw(spec, state);
  try {
    const reason = byId("reason").value.trim();
    const body = await spec.body();
    // What has come since it was told is not done with the rest: nobody has seen it.
    const bound = "select" in body ? { at_most: state.preview.count } : {};
    const answer = await act(spec.outbox, spec.action, { ...body, ...bound, ...forced(state), reason });
    byId("dialog").close();
    announce(answer.text);
    spec.done?.(answer);
  } catch (error) {
    Object.assign(state, { problem: asProblem(error), preview: null, isBusy: false });
    draw(spec, state);
    if (error.code !== "more_by_now") return;
    announce(error.message);
    tell(spec, state);
  }
}

const asProblem = (error) => (error instanceof ApiError ? error : new ApiError(0, { message: String(error.message ?? error) }));

/** Show the result of an action, and have screen readers say it. */
export function announce(text) {
  const close = () => shown.remove();
  const shown = h("div", { class: "result" }, h("span", {}, text), button("✕", close, { "aria-label": "Close this message" }));
  byId("results").append(shown);
  setTimeout(close, RESULT_SECONDS * 1000);
}

/** Return the buttons of what may be done to held records: `select` is a selection of the API, or a function for one. */
export function heldRecordButtons(context, select, label) {
  if (!context.can("operate")) return null;
  const open = (spec) => () =>
    openAction({ outbox: context.outbox, body: async () => ({ select: typeof select === "function" ? await select() : select }), done: context.refresh, ...spec });
  return [
    button("Release", open(RELEASE), { class: "primary", "aria-label": `Release ${label}`, key: "release" }),
    button("Dead-letter", open(DEAD_LETTER), { "aria-label": `Dead-letter ${label}`, key: "dead-letter" }),
    button("Skip", open(SKIP), { "aria-label": `Skip ${label}`, key: "skip" }),
  ];
}

export const RELEASE = {
  action: "release",
  title: "Release",
  explain: "What is held is published as if it had never been held, before the records that wait behind it. What Kafka refuses again is held again: mend the cause first.",
  verb: "Release",
};
const DEAD_LETTER = {
  action: "dead-letter",
  title: "Send to the dead-letter topic",
  explain: "The harvester publishes these held records to the dead-letter topic, with where they should have gone, and removes them here. The records behind them go on.",
  verb: "Dead-letter",
};
const SKIP = {
  action: "skip",
  title: "Skip: delete for good",
  explain: "These held records are deleted and reach no consumer. The records behind them go on. This cannot be undone.",
  verb: "Delete for good",
  danger: true,
};

/** Return the button that ends a pause of a topic or key. */
export function resumeButton(context, topic, key = null) {
  if (!context.can("operate")) return null;
  const which = key === null ? { topic } : { topic, key };
  const open = () =>
    openAction({
      outbox: context.outbox,
      action: "resume",
      title: key === null ? `Resume topic ${topic}` : `Resume key ${key} of ${topic}`,
      explain: "Its records are published again, from where it stopped. Records of it that are held themselves stay held.",
      verb: "Resume",
      body: () => which,
      done: context.refresh,
    });
  return button("Resume", open, { class: "primary", "aria-label": `Resume ${key === null ? topic : `${key} of ${topic}`}` });
}
