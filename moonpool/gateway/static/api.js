// Calls to this gateway. The key stays in this tab's session storage, and goes nowhere else.

const KEY = "moonpool-key";

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** An answer that is no success; message and code are the gateway's own. `id` is that of the request, "" if unknown. */
export class Refused extends Error {
  constructor(status, message, code = "", id = "") {
    super(message);
    Object.assign(this, { status, code, id });
  }
}

async function call(path, options = {}) {
  const headers = key() ? { authorization: `Bearer ${key()}` } : {};
  if (options.body) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the gateway cannot be reached");
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  if (answer.status === 401 && !key()) throw new Refused(401, "This gateway asks for an API key: give one above.");
  const id = answer.headers.get("x-request-id") ?? "";
  throw new Refused(answer.status, told?.error?.message ?? `HTTP ${answer.status}`, told?.error?.code ?? "", id);
}

export const text = async (path) => (await call(path)).text();

export const get = async (path) => (await call(path)).json();

export const post = async (path, body) => (await call(path, { method: "POST", body: JSON.stringify(body) })).json();

/** As `post`, but returns the request's id, by which the conductor knows what happened. */
export async function ask(path, body) {
  const answer = await call(path, { method: "POST", body: JSON.stringify(body) });
  await answer.json();
  return answer.headers.get("x-request-id") ?? "";
}

/** Begins a streamed answer; returns the request's id and its events, the JSON of each. */
export async function stream(path, body, signal) {
  const answer = await call(path, { method: "POST", body: JSON.stringify(body), signal });
  return { id: answer.headers.get("x-request-id") ?? "", events: events(answer.body) };
}

async function* events(body) {
  let rest = "";
  const decoder = new TextDecoder();
  const reader = body.getReader();
  for (;;) {
    const { done, value } = await reader.read().catch(broken);
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refused(0, event.error.message, event.error.code ?? "");
      yield event;
    }
  }
}

function broken(error) {
  throw error.name === "AbortError" ? error : new Refused(0, "the connection to the gateway broke");
}
