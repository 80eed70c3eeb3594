// Numbers, times and values as people read them.

const UNITS = [
  ["d", 86400],
  ["h", 3600],
  ["min", 60],
];

/** Return whole numbers with thin spaces between thousands, "–" for null. */
export function count(number) {
  if (number === null || number === undefined) return "–";
  return Math.round(number).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

/** Return a number "of" things: plural(1, "record") is "1 record". */
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Return a time span: 0.0042 is "4.2 ms", 75 is "1 min 15 s", 90000 is "1 d 1 h". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return `${round(seconds * 1000, seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 59.95) return `${round(seconds, seconds < 9.95 ? 1 : 0)} s`;
  const index = UNITS.findIndex(([, size]) => seconds >= size || size === 60);
  const [unit, size] = UNITS[index];
  const [nextUnit, nextSize] = UNITS[index + 1] ?? ["s", 1];
  const total = Math.round(seconds);
  const whole = Math.floor(total / size);
  const rest = Math.floor((total - whole * size) / nextSize);
  return rest > 0 ? `${whole} ${unit} ${rest} ${nextUnit}` : `${whole} ${unit}`;
}

/** Return a rate: "12.5/s". */
export function rate(perSecond) {
  if (perSecond === null || perSecond === undefined) return "–";
  return `${perSecond < 99.5 ? round(perSecond, 1) : count(perSecond)}/s`;
}

/** Return a size: "1.2 MB". */
export function bytes(number) {
  if (number === null || number === undefined) return "–";
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let power = 0;
  let size = number;
  while (size >= 1000 && power < units.length - 1) {
    size /= 1000;
    power += 1;
  }
  return power === 0 && number === 1 ? "1 byte" : `${round(size, power ? 1 : 0)} ${units[power]}`;
}

function round(number, digits) {
  return Number(number.toFixed(digits)).toString();
}

/** Return when something was in local time, with the date unless it is today: "14:03:12", "2026-11-22 14:03:12". */
export function clock(at, now = new Date()) {
  const date = new Date(at);
  if (Number.isNaN(date.getTime())) return String(at);
  const two = (part) => String(part).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  if (date.toDateString() === now.toDateString()) return time;
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}`;
}

/** Return how long ago something was: "3 min 2 s ago". */
export function ago(at, now = Date.now()) {
  const seconds = (now - new Date(at).getTime()) / 1000;
  return Number.isNaN(seconds) ? "–" : seconds < 1 ? "just now" : `${duration(Math.floor(seconds))} ago`;
}

const LONGEST_INDENTED = 20_000_000;

/**
 * Return JSON text with line breaks and indentation, every number and string left as it was written; null if it is none,
 * or is nested so deeply that its indentation would fill the memory.
 *
 * It is parsed only to see if it is JSON: values that are parsed and written again would lose digits of large numbers,
 * repeated names and the order of names that look like numbers.
 */
export function indentJson(text) {
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  const tokens = text.match(/"(?:[^"\\]|\\.)*"|[[\]{},:]|[^\s[\]{},:"]+/g) ?? [];
  let depth = 0;
  let indented = "";
  for (const [index, token] of tokens.entries()) {
    if (indented.length > LONGEST_INDENTED) return null;
    const opens = token === "{" || token === "[";
    const closes = token === "}" || token === "]";
    const isEmpty = closes && "{[".includes(tokens[index - 1]);
    if (closes) depth -= 1;
    if (closes && !isEmpty) indented += lineBreak(depth);
    indented += token === ":" ? ": " : token;
    if (opens) depth += 1;
    const next = tokens[index + 1];
    if (token === "," || (opens && next !== "}" && next !== "]")) indented += lineBreak(depth);
  }
  return indented;
}

const lineBreak = (depth) => `\n${"  ".repeat(depth)}`;

/** Return the bytes of base64 as a hex dump, 16 in a line with offset and printable characters. */
export function hexDump(base64) {
  const binary = atob(base64);
  const lines = [];
  for (let start = 0; start < binary.length; start += 16) {
    const part = binary.slice(start, start + 16);
    const codes = [...part].map((character) => character.charCodeAt(0));
    const hex = codes.map((code) => code.toString(16).padStart(2, "0")).join(" ");
    const shown = codes.map((code) => (code >= 32 && code < 127 ? String.fromCharCode(code) : ".")).join("");
    lines.push(`${start.toString(16).padStart(6, "0")}  ${hex.padEnd(47)}  ${shown}`);
  }
  return lines.join("\n");
}
