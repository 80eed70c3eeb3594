// Keys that do something, and the dialog that lists them.

import { byId, h } from "./dom.js";
import { button } from "./parts.js";

const STORED = "outbox-console-shortcuts";

/** Act on keys: `shortcuts` are [key, what it does, function]. */
export function listenForShortcuts(shortcuts) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("dialog").open || isTyping(event.target)) return;
    const found = shortcuts.find(([key]) => key === event.key);
    if (!found || (!areOn() && event.key !== "?")) return;
    event.preventDefault();
    found[2]();
  });
}

const isTyping = (target) => target.closest("input:not([type=checkbox]), select, textarea") !== null;

/** Single keys can be switched off: who dictates to the computer types them by accident. */
function areOn() {
  try {
    return localStorage.getItem(STORED) !== "off";
  } catch {
    return true;
  }
}

function switchTo(isOn) {
  try {
    localStorage.setItem(STORED, isOn ? "on" : "off");
  } catch {
    // storage is switched off: they stay on
  }
}

/** Show the list. */
export function shortcutsDialog(shortcuts) {
  const dialog = byId("dialog");
  const pairs = shortcuts.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]);
  dialog.replaceChildren(
    h(
      "div",
      { class: "stack" },
      h("h2", { id: "dialog-title" }, "Keyboard shortcuts"),
      h("dl", { class: "pairs" }, pairs, h("dt", {}, h("kbd", {}, "Esc")), h("dd", {}, "close a dialog")),
      h("label", { class: "check" }, h("input", { type: "checkbox", checked: areOn(), onchange: (event) => switchTo(event.target.checked) }), "Single keys are on (? always works)"),
      h("div", { class: "buttons" }, button("Close", () => dialog.close(), { class: "primary" })),
    ),
  );
  dialog.showModal();
}
