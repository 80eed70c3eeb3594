// The chosen theme, before anything is painted. Not a module: modules run after the first paint.
"use strict";

{
  const KEY = "outbox-console-theme";
  const THEMES = ["auto", "light", "dark"];

  const stored = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage is switched off
    }
  };

  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };

  let current = THEMES.includes(stored()) ? stored() : "auto";
  show(current);

  /** The page's themes: `current`, and `next()`, which chooses the next one. */
  window.outboxTheme = {
    get current() {
      return current;
    },
    next() {
      current = THEMES[(THEMES.indexOf(current) + 1) % THEMES.length];
      show(current);
      try {
        localStorage.setItem(KEY, current);
      } catch {
        // chosen for this visit only
      }
      return current;
    },
  };
}
