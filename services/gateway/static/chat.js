// The playground: a conversation, what of each prompt came from the cache, and the speeds.

import { post, stream } from "./api.js";
import { byId, count, el, seconds } from "./dom.js";

let turns = [];
let stopping = null;

export function start() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("stop").addEventListener("click", () => stopping?.abort());
  byId("new").addEventListener("click", () => {
    stopping?.abort();
    turns = [];
    byId("talk").replaceChildren();
    byId("text").focus();
  });
}

function number(id) {
  const value = byId(id).value.trim();
  return value === "" ? undefined : Number(value);
}

function parameters() {
  const names = ["temperature", "top_p", "max_tokens", "seed"];
  return Object.fromEntries(names.map((name) => [name, number(name)]));
}

function turn(who, said) {
  const text = el("p", { class: "said" }, said);
  const shown = el("article", { class: `turn ${who}` }, el("h3", {}, who === "user" ? "You" : "Model"), text);
  byId("talk").append(shown);
  shown.scrollIntoView({ block: "nearest" });
  return { shown, text };
}

async function send() {
  const said = byId("text").value.trim();
  if (!said || stopping) return;
  byId("talk").querySelector(".hint")?.remove();
  byId("text").value = "";
  const before = turns;
  const system = byId("system").value.trim();
  turns = [...before, { role: "user", content: said }];
  const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
  turn("user", said);
  const answer = turn("assistant", "");
  const own = (stopping = new AbortController());
  busy(true);
  try {
    const heard = await listen(messages, answer, own.signal);
    if (turns.length === before.length + 1) turns = [...turns, heard];
  } catch (error) {
    if (turns.length === before.length + 1) turns = before;
    answer.shown.append(el("p", { class: "problem", role: "alert" }, error.message));
    if (!byId("text").value) byId("text").value = said;
  } finally {
    stopping = null;
    busy(false);
  }
}

function busy(now) {
  byId("send").disabled = now;
  byId("stop").disabled = !now;
  byId("talk").setAttribute("aria-busy", String(now));
}

/** Shows an answer as it comes; returns the turn, also one that was stopped. */
async function listen(messages, answer, signal) {
  const began = performance.now();
  let [said, first, usage, reason, id] = ["", 0, null, "stopped", ""];
  try {
    const options = { ...parameters(), stream: true, stream_options: { include_usage: true } };
    const begun = await stream("/v1/chat/completions", { messages, ...options }, signal);
    id = begun.id;
    for await (const event of begun.events) {
      first ||= performance.now();
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      reason = choice?.finish_reason ?? reason;
      said += choice?.delta?.content ?? "";
      answer.text.textContent = said;
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
  answer.shown.append(note(id, usage, reason, began, first));
  if (usage) answer.shown.append(await prompt(messages, usage.prompt_tokens_details.cached_tokens));
  return { role: "assistant", content: said };
}

function note(id, usage, reason, began, first) {
  if (!usage) return el("p", { class: "note" }, reason);
  const cached = usage.prompt_tokens_details.cached_tokens;
  const made = usage.completion_tokens;
  const left = (performance.now() - first) / 1000;
  const parts = [
    reason,
    `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens from the cache`,
    `first token after ${seconds((first - began) / 1000)}`,
    made > 1 && left > 0 ? `${count(made)} tokens, ${(made / left).toFixed(1)} per second` : `${count(made)} tokens`,
  ];
  return el("p", { class: "note" }, `${parts.join(" · ")} · `, el("a", { href: `#requests/${id}` }, "where the time went"));
}

/** The prompt's tokens; those that came from the cache are its beginning. */
async function prompt(messages, cached) {
  const details = el("details", {}, el("summary", {}, "The prompt's tokens"));
  details.addEventListener("toggle", async () => {
    if (!details.open || details.childElementCount > 1) return;
    const shown = el("div", { class: "prompt" });
    const key = [el("span", { class: "key fill-kept" }), "underlined: from the cache"];
    details.append(el("p", { class: "note" }, key), shown);
    try {
      const { token_strs: pieces } = await post("/tokenize", { messages, return_token_strs: true });
      shown.append(...pieces.map((piece, at) => el("span", at < cached ? { class: "cached" } : {}, piece)));
    } catch (error) {
      shown.append(el("p", { class: "problem" }, error.message));
    }
  });
  return details;
}
