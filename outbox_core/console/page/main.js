// The page: who is here, which outbox and view are shown, and when all of it is asked for anew.

import { ApiError, ask, askOutboxes, login, logout, readSession } from "./api.js";
import { announce } from "./actions.js";
import { byId, h, update } from "./dom.js";
import { duration } from "./format.js";
import { numberTiles } from "./numbers.js";
import { button, unavailable } from "./parts.js";
import { listenForShortcuts, shortcutsDialog } from "./shortcuts.js";
import * as overview from "./overview.js";
import * as records from "./records.js";
import * as holds from "./holds.js";
import * as findings from "./findings.js";
import * as deadLetters from "./dead_letters.js";
import * as history from "./history.js";

/** Views by their name in the address. Each has `title`, `everySeconds`, `load(context)` and `render(context, data)`. */
const VIEWS = { overview, records, holds, findings, "dead-letters": deadLetters, history };
const STATUS_EVERY_SECONDS = 2;
const NUMBERS_EVERY_SECONDS = 10;
const TICK_MS = 500;

const state = {
  session: null,
  outboxes: [],
  outbox: null,
  view: "overview",
  params: new URLSearchParams(),
  isPaused: false,
  answers: {}, // name of a question -> {data, error, at, isAsking, wanted}
  generation: 0, // of answers: those to questions about another outbox or view are dropped
};

const context = {
  get outbox() {
    return state.outbox;
  },
  get params() {
    return state.params;
  },
  get status() {
    return state.answers.status?.data ?? null;
  },
  /** Tell if the user may do this; what one may not do is not shown. */
  can: (permission) => state.session?.user?.permissions.includes(permission) ?? false,
  /** Return the address of a view with parameters, for links. */
  href: (view, params = {}) => addressOf(state.outbox, view, params),
  /** Go to a view; empty parameters are left out. */
  go: (view, params = {}) => {
    location.hash = addressOf(state.outbox, view, params);
  },
  /** Ask for everything anew. */
  refresh: () => {
    for (const answer of Object.values(state.answers)) answer.wanted = true;
    tick();
  },
  /** Draw the view again from what is known. */
  redraw: () => draw(),
};

function addressOf(outbox, view, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  return `#/${encodeURIComponent(outbox)}/${view}${query.size ? `?${query}` : ""}`;
}

/** Take outbox, view and parameters from the address; what is not known becomes the first. */
function readAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [outbox, view] = path.split("/").map(decoded);
  state.outbox = state.outboxes.some(({ name }) => name === outbox) ? outbox : (state.outboxes[0]?.name ?? null);
  state.view = Object.hasOwn(VIEWS, view) ? view : "overview";
  state.params = new URLSearchParams(query ?? "");
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** What is asked for, how often, and by which function. */
function questions() {
  const view = VIEWS[state.view];
  return [
    ["status", STATUS_EVERY_SECONDS, () => ask(state.outbox, "status")],
    ["numbers", NUMBERS_EVERY_SECONDS, () => ask(state.outbox, "statistics", { hours: 0.1 })],
    ["findings", NUMBERS_EVERY_SECONDS, () => ask(state.outbox, "findings")],
    ["leadership", NUMBERS_EVERY_SECONDS, () => ask(state.outbox, "events", { hours: 168, kinds: "leader_acquired", limit: 1 })],
    ["view", view.everySeconds, () => view.load(context)],
  ];
}

/** Ask what is due. Hidden tabs and paused ones ask nothing but what the user wants. */
function tick() {
  if (!state.session?.user || state.outbox === null) return;
  for (const [name, everySeconds, put] of questions()) {
    const answer = (state.answers[name] ??= { data: null, error: null, at: -Infinity, isAsking: false, wanted: true });
    const isDue = !document.hidden && !state.isPaused && performance.now() - answer.at >= everySeconds * 1000;
    if ((answer.wanted || isDue) && !answer.isAsking) putQuestion(answer, put);
  }
  drawFreshness();
}

async function putQuestion(answer, put) {
  const { generation } = state;
  Object.assign(answer, { isAsking: true, wanted: false });
  try {
    const data = await put();
    Object.assign(answer, { data, error: null, answeredAt: performance.now() });
  } catch (error) {
    answer.error = error instanceof ApiError ? error : new ApiError(0, { message: `a defect of this page: ${error.stack ?? error}` });
  }
  Object.assign(answer, { isAsking: false, at: performance.now() });
  if (generation !== state.generation) return;
  if (answer.error?.status === 401) await start();
  else draw();
}

/** Draw everything from what is known; only what differs changes. */
function draw() {
  if (!state.session?.user) return;
  const { status, numbers, view, findings: examined } = state.answers;
  drawChooser();
  drawTabs(status?.data, examined?.data);
  drawOutages(status, view);
  update(byId("numbers"), numberTiles(status?.data ?? null, numbers?.data ?? null, state.answers.leadership?.data ?? null));
  drawView(view);
  drawFreshness();
}

function drawView(answer) {
  const shown = VIEWS[state.view];
  document.title = `${shown.title} · ${state.outbox} · Outbox console`;
  update(byId("heading"), `${shown.title} of ${state.outbox}`);
  if (answer?.data) {
    update(byId("view"), shown.render(context, answer.data));
    shown.drawn?.(byId("view"), context, answer.data);
  } else {
    update(byId("view"), answer?.error ? null : h("p", { class: "empty", key: "asking" }, "Asking…"));
  }
}

function drawChooser() {
  const choose = (event) => {
    location.hash = addressOf(event.target.value, state.view);
  };
  const options = state.outboxes.map(({ name, table }) => h("option", { value: name, key: name, selected: name === state.outbox }, `${name} (${table})`));
  update(byId("chooser"), h("select", { "aria-label": "Outbox", onchange: choose, key: "outbox" }, options));
  byId("chooser").querySelector("select").value = state.outbox;
}

function drawTabs(status, examined) {
  const held = status?.database.data?.holds;
  const troubles = examined?.data?.findings.filter(({ verdict }) => verdict !== "ok") ?? [];
  const worst = troubles.some(({ verdict }) => verdict === "problem") ? "problem" : "warning";
  const badges = {
    holds: held && badge(held.records + held.keys + held.topics.length, "warning", "holds"),
    findings: badge(troubles.length, worst, "to look at"),
  };
  const links = Object.entries(VIEWS).map(([name, { title }]) =>
    h("a", { href: addressOf(state.outbox, name), key: name, "aria-current": name === state.view && "page" }, title, badges[name]),
  );
  const { home, login: way } = state.session;
  const back = home && h("a", { href: home.href, key: "home" }, home.text);
  const out = way === "token" && h("a", { href: "#", key: "logout", onclick: leave }, "Log out");
  update(byId("tabs"), links, back, out);
}

const badge = (number, kind, what) => (number ? h("span", { class: `badge ${kind}` }, number, h("span", { class: "hidden" }, ` ${what}`)) : null);

async function leave(event) {
  event.preventDefault();
  await logout();
  await start();
}

/** Say what does not answer: the console's server, or a half of what it asks. */
function drawOutages(status, view) {
  const notices = [];
  const failed = [status, view].find((answer) => answer?.error);
  if (failed) {
    const { message, remedy } = failed.error;
    notices.push(h("div", { class: "notice problem", role: "alert", key: "server" }, h("strong", {}, "No answer, what is shown is old"), h("p", {}, message), remedy && h("p", {}, remedy)));
  }
  for (const half of ["database", "kafka"]) {
    const found = status?.data?.[half];
    if (found?.unavailable && (found.at !== null || found.unavailable.service === "database")) notices.push(unavailable(found.unavailable, half));
  }
  update(byId("outages"), notices);
  document.body.toggleAttribute("data-stale", Boolean(status?.error));
}

function drawFreshness() {
  const answer = state.answers.status;
  const age = answer?.answeredAt ? (performance.now() - answer.answeredAt) / 1000 : null;
  const isStale = Boolean(answer?.error) || (!state.isPaused && age !== null && age > 5 * STATUS_EVERY_SECONDS);
  const mode = isStale ? "stale" : state.isPaused ? "paused" : "live";
  const texts = { live: ["Live", ""], paused: ["Paused", ""], stale: ["Stale", age === null ? "" : `: ${duration(Math.floor(age))} old`] };
  const [text, more] = texts[mode];
  byId("freshness").dataset.state = mode;
  byId("freshness").title = "Refresh by itself (p)";
  byId("freshness").setAttribute("aria-pressed", String(!state.isPaused));
  update(byId("freshness"), text, h("span", { class: "wide" }, more));
}

function pause() {
  state.isPaused = !state.isPaused;
  tick();
}

function drawTheme() {
  const { current } = window.outboxTheme;
  byId("theme").setAttribute("aria-label", `Theme: ${current}`);
  update(byId("theme"), current === "dark" ? "☾" : current === "light" ? "☀" : "◐", h("span", { class: "wide" }, ` ${current}`));
}

function changeTheme() {
  window.outboxTheme.next();
  drawTheme();
  repaint();
}

function repaint() {
  VIEWS[state.view].repaint?.(byId("view"));
  draw();
}

/** Show what the address names, asked for anew. */
function navigate() {
  if (!state.session?.user) return; // `start` comes back when somebody is logged in
  const before = state.outbox;
  readAddress();
  state.generation += 1;
  if (state.outbox === before) delete state.answers.view;
  else state.answers = {};
  draw();
  byId("tabs").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  tick();
}

/** Show the form for a token, or the reason why there is nothing to see. */
function drawDoor(session) {
  for (const id of ["chooser", "tabs", "outages", "numbers"]) update(byId(id));
  if (session.login === "token") update(byId("view"), loginForm());
  else update(byId("view"), h("div", { class: "notice problem", key: "refusal" }, h("strong", {}, "Not for you"), h("p", {}, session.refusal)));
  byId("view").querySelector("input")?.focus();
}

function loginForm() {
  const submit = async (event) => {
    event.preventDefault();
    const field = byId("token");
    try {
      await login(field.value, byId("login-name").value.trim());
      await start();
    } catch (error) {
      field.value = "";
      field.focus();
      update(byId("login-problem"), error.message);
    }
  };
  return h(
    "form",
    { class: "card login", key: "login", onsubmit: submit },
    h("h2", {}, "Log in"),
    h("p", {}, "The console asks for the token with which it was started."),
    h("label", { class: "field" }, h("span", {}, "Token"), h("input", { id: "token", type: "password", required: true, autocomplete: "current-password" })),
    h("label", { class: "field" }, h("span", {}, "Your name, for the history (may be empty)"), h("input", { id: "login-name", maxlength: 100, autocomplete: "name" })),
    h("p", { id: "login-problem", role: "alert", "data-keep": true }),
    h("div", { class: "buttons" }, h("button", { type: "submit", class: "primary" }, "Log in")),
  );
}

/** Begin, and begin anew after a login or logout. */
async function start() {
  state.generation += 1;
  state.answers = {};
  try {
    state.session = await readSession();
    if (!state.session.user) {
      drawDoor(state.session);
      return;
    }
    state.outboxes = await askOutboxes();
  } catch (error) {
    const again = button("Try again", start);
    update(byId("view"), h("div", { class: "notice problem", role: "alert", key: "start" }, h("strong", {}, "The console cannot start"), h("p", {}, error.message), h("div", {}, again)));
    return;
  }
  navigate();
}

const shortcuts = [
  ...Object.entries(VIEWS).map(([name, { title }], index) => [String(index + 1), `show ${title}`, () => context.go(name)]),
  ["/", "search records", () => (state.view === "records" ? records.focusSearch() : context.go("records", { search: "1" }))],
  ["r", "refresh now", () => context.refresh()],
  ["p", "stop and start refreshing by itself", pause],
  ["t", "change the theme: as the system, light, dark", changeTheme],
  ["o", "choose the outbox", () => byId("chooser").querySelector("select")?.focus()],
  ["?", "show this list", () => shortcutsDialog(shortcuts)],
];

byId("freshness").onclick = pause;
byId("theme").onclick = changeTheme;
byId("help").onclick = () => shortcutsDialog(shortcuts);
drawTheme();
listenForShortcuts(shortcuts);
addEventListener("hashchange", navigate);
addEventListener("resize", () => draw());
document.addEventListener("visibilitychange", tick);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
setInterval(tick, TICK_MS);
addEventListener("unhandledrejection", (event) => announce(`A defect of this page: ${event.reason?.message ?? event.reason}`));
start();
