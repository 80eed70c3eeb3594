// Elements from data, and the page brought up to date in place.
//
// Text from data only ever becomes text nodes and attribute values: nothing here, or elsewhere in the page, parses HTML.

const HANDLERS = ["onclick", "onsubmit", "oninput", "onchange", "onkeydown", "ontoggle", "onscroll"];

/**
 * Return a new element: h("button", {class: "quiet", onclick: close}, "Close").
 *
 * Attributes that are null, undefined or false are left out, true is an empty one. `key` names an element among its
 * siblings, so that `update` finds it again; `on...` and `checked` are properties. Children are nodes, text, numbers,
 * or lists of them; null and false are left out.
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAll(element, attributes);
  append(element, children);
  return element;
}

/** Return a new element of SVG, as `h` does. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAll(element, attributes);
  append(element, children);
  return element;
}

function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (HANDLERS.includes(name) || name === "checked") element[name] = value;
    else if (name === "key") element.dataset.key = value;
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : String(child));
    }
  }
}

/**
 * Make the children of an element what they should be, and change no more than that.
 *
 * Elements that stay keep focus, selection, scroll position, what was typed into them, and what the user unfolded.
 * The children of one with `data-keep` are its own: charts.
 */
export function update(element, ...children) {
  const wanted = document.createElement("div");
  append(wanted, children);
  updateChildren(element, wanted);
}

function updateChildren(element, wanted) {
  const byKey = removeUnwanted(element, wanted);
  let present = element.firstChild;
  for (const child of [...wanted.childNodes]) {
    const kept = counterpart(child, present, byKey);
    if (kept === null) {
      element.insertBefore(child, present);
      continue;
    }
    if (kept === present) present = present.nextSibling;
    else element.insertBefore(kept, present);
    updateNode(kept, child);
  }
  while (present !== null) {
    const next = present.nextSibling;
    present.remove();
    present = next;
  }
}

/** Return the children that have a key; those that are no longer wanted go first, as what is moved loses the focus. */
function removeUnwanted(element, wanted) {
  const keys = new Set(Array.from(wanted.children, (child) => child.dataset.key));
  const byKey = new Map();
  for (const child of [...element.children]) {
    const { key } = child.dataset;
    if (key && !keys.has(key)) child.remove();
    else if (key) byKey.set(key, child);
  }
  return byKey;
}

/** Return the node that shall become like `child`: that of its key, else the next one, if it is of the same kind. */
function counterpart(child, present, byKey) {
  const key = child.dataset?.key;
  if (key) {
    const found = byKey.get(key);
    return found && found.nodeName === child.nodeName ? found : null;
  }
  if (present === null || present.dataset?.key) return null;
  return present.nodeName === child.nodeName ? present : null;
}

function updateNode(kept, wanted) {
  if (kept.nodeType === Node.TEXT_NODE) {
    if (kept.data !== wanted.data) kept.data = wanted.data;
    return;
  }
  updateAttributes(kept, wanted);
  for (const name of HANDLERS) kept[name] = wanted[name];
  if (kept.type === "checkbox" || kept.type === "radio") kept.checked = wanted.checked;
  if (!("keep" in kept.dataset)) updateChildren(kept, wanted);
}

function updateAttributes(kept, wanted) {
  for (const { name, value } of [...wanted.attributes]) {
    if (name === "value" && kept.nodeName === "INPUT") continue; // what was typed stays
    if (kept.getAttribute(name) !== value && name !== "open") kept.setAttribute(name, value);
  }
  for (const { name } of [...kept.attributes]) {
    if (name !== "open" && name !== "style" && !wanted.hasAttribute(name)) kept.removeAttribute(name);
  }
}

/** Return the element of the page with this id. */
export const byId = (id) => document.getElementById(id);
