// Questions to the server, and actions. All addresses are relative: the page works under any prefix.

/** An answer that is an error, or none: `status` (0 without an answer), `code`, `message`, `remedy`, `body`. */
export class ApiError extends Error {
  constructor(status, error = {}) {
    super(error.message || `the server answered with status ${status}`);
    this.status = status;
    this.code = error.code ?? "";
    this.remedy = error.remedy ?? "";
    this.where = error.where ?? "";
    this.body = error;
  }
}

const SECONDS_TO_ANSWER = 20;
let csrf = null;

/** Return the session: user, permissions, and how to log in; it also arms the actions. */
export async function readSession() {
  const session = await request("api/session");
  csrf = session.csrf;
  return session;
}

/** Return the answer to a question about an outbox: ask("shop", "records", {topic: "orders"}). Empty parameters are left out. */
export function ask(outbox, route, parameters = {}, signal = null) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const tail = query.size ? `?${query}` : "";
  return request(`${addressOf(outbox)}/${route}${tail}`, { signal });
}

/** Return the outboxes of this console. */
export const askOutboxes = async () => (await request("api/outboxes")).outboxes;

/** Return the address of a route of an outbox, for links. */
export const addressOf = (outbox, route = "") => `api/outboxes/${encodeURIComponent(outbox)}${route && `/${route}`}`;

/** Do something to an outbox, or with `dry_run` tell what would be done. */
export const act = (outbox, action, body) => post(`${addressOf(outbox)}/actions/${action}`, body);

/** Log in with a token, and the name under which the history keeps actions; the server keeps the login in a cookie. */
export const login = (token, name) => post("api/login", name ? { token, name } : { token });
export const logout = () => post("api/logout", {});

async function post(address, body) {
  try {
    return await send(address, body);
  } catch (error) {
    if (error.code !== "forged") throw error;
    await readSession(); // the server has started anew since
    return send(address, body);
  }
}

function send(address, body) {
  return request(address, {
    method: "POST",
    headers: { "Content-Type": "application/json", [csrf.header]: csrf.token },
    body: JSON.stringify(body),
  });
}

async function request(address, { signal = null, ...options } = {}) {
  const limits = [AbortSignal.timeout(SECONDS_TO_ANSWER * 1000)];
  if (signal) limits.push(signal);
  let response;
  let answer;
  try {
    response = await fetch(address, { credentials: "same-origin", ...options, signal: AbortSignal.any(limits) });
    answer = await response.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    if (response && !response.ok) throw new ApiError(response.status);
    throw new ApiError(0, { code: "no_answer", message: reasonOf(error) });
  }
  if (!response.ok) throw new ApiError(response.status, answer.error ? { ...answer, ...answer.error } : {});
  return answer;
}

function reasonOf(error) {
  if (error.name === "TimeoutError") return `the console's server has not answered for ${SECONDS_TO_ANSWER} s`;
  if (error instanceof SyntaxError) return "what answered is not the console: its answer is no JSON";
  return "the console's server cannot be reached";
}
