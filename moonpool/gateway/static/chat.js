// The playground: conversations, what of each prompt came from the cache, and the speeds.

import { get, post, stream } from "./api.js";
import { remember, remove, save, saved, shownBefore } from "./conversations.js";
import { button, byId, copy, count, el, seconds } from "./dom.js";
import { markdown } from "./markdown.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const SETTINGS = ["system", ...NUMBERS];
const TITLE_CHARS = 60;

// {id, settings, turns}; a turn is {role, content}, of an answer also {reasoning, figures, error}.
let conversation = null;
let editing = null; // the user's turn that is edited
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
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing) return;
    if (stopping) stopping.abort();
    else if (editing) edit(null);
  });
  byId("stop").addEventListener("click", () => stopping?.abort());
  byId("cancel").addEventListener("click", () => edit(null));
  byId("new").addEventListener("click", () => open(fresh()));
  byId("delete").addEventListener("click", () => {
    remove(conversation.id);
    open(fresh());
  });
  byId("conversations").addEventListener("change", ({ target }) => {
    open(saved().find(({ id }) => id === target.value) ?? fresh());
  });
  byId("parameters").addEventListener("change", () => keep(conversation));
  addEventListener("pagehide", () => keep(conversation));
  open(shownBefore() ?? fresh());
}

// randomUUID needs HTTPS.
const fresh = () => ({ id: `${Date.now()}-${Math.random()}`, settings: settings(), turns: [] });

const settings = () => Object.fromEntries(SETTINGS.map((name) => [name, byId(name).value]));

function open(wanted) {
  stopping?.abort();
  conversation = wanted;
  remember(wanted.id);
  for (const name of SETTINGS) byId(name).value = wanted.settings?.[name] ?? "";
  byId("talk").replaceChildren();
  edit(null);
  for (const turn of wanted.turns) settle(show(turn), turn);
  list();
  byId("text").focus();
}

/** Saves a conversation, unless there is nothing in it, or it was deleted while its answer came. */
function keep(own) {
  if (own === conversation) own.settings = settings();
  else if (!saved().some(({ id }) => id === own.id)) return;
  if (own.turns.length) save(own);
}

/** Fills the list of conversations, and says what the page is for while there is nothing to show. */
function list() {
  const title = ({ turns }) => turns[0]?.content.slice(0, TITLE_CHARS) || "New conversation";
  const others = saved().filter(({ id }) => id !== conversation.id);
  byId("conversations").replaceChildren(...[conversation, ...others].map((each) =>
    el("option", { value: each.id }, title(each))));
  byId("conversations").value = conversation.id;
  byId("hint").hidden = conversation.turns.length > 0;
}

/** Puts a turn of the user into the box, whence it is sent anew; null: no longer. */
function edit(turn) {
  if (editing || turn) byId("text").value = turn?.content ?? "";
  editing = turn;
  byId("cancel").hidden = !turn;
  byId("text-label").textContent = turn ? "Edit: what followed this turn is replaced" : "Your turn";
  if (turn) byId("text").focus();
}

/** Takes away a turn and all that follow. */
function cut(turn) {
  const at = conversation.turns.indexOf(turn);
  conversation.turns.length = at;
  while (byId("talk").childElementCount > at) byId("talk").lastElementChild.remove();
}

function send() {
  const said = byId("text").value.trim();
  if (!said || stopping) return;
  if (editing) cut(editing);
  edit(null);
  byId("text").value = "";
  const turn = { role: "user", content: said };
  conversation.turns.push(turn);
  settle(show(turn), turn);
  answer();
}

/** Draws a turn; returns the elements that change. */
function show(turn) {
  const own = turn.role === "user";
  const view = { said: el("div", { class: "said" }), more: el("div") };
  const change = own
    ? button("Edit", () => edit(turn), { class: "change" })
    : button("Regenerate", () => { cut(turn); edit(null); answer(); }, { class: "change" });
  const actions = el("div", { class: "actions" }, button("Copy", ({ target }) => copy(target, view.said, turn.content)), change);
  view.shown = el("article", { class: `turn ${turn.role}` }, el("h3", {}, own ? "You" : "Model"), view.said, view.more, actions);
  byId("talk").append(view.shown);
  view.shown.scrollIntoView({ block: "nearest" });
  return view;
}

/** Draws a turn that no longer changes: its Markdown, its figures, why it failed. */
function settle({ said, more }, turn) {
  said.textContent = turn.content;
  if (turn.role === "user") return;
  if (turn.content) {
    markdown(turn.content).then((nodes) => {
      said.replaceChildren(...nodes);
      said.classList.toggle("rendered", nodes[0] instanceof Element);
    }, () => {}); // without the gateway, the text stays as it is
  }
  more.replaceChildren(...[
    turn.reasoning ? el("details", {}, el("summary", {}, "Thinking"), el("p", { class: "said" }, turn.reasoning)) : null,
    turn.error ? problem(turn.error) : null,
    turn.figures && (turn.figures.prompt_tokens || !turn.error) ? note(turn.figures) : null,
    turn.figures?.prompt_tokens ? prompt(turn) : null,
  ].filter((part) => part !== null));
}

function busy(now) {
  byId("send").disabled = now;
  byId("stop").disabled = !now;
  byId("talk").setAttribute("aria-busy", String(now));
}

/** What the model reads before a turn. A turn of the user without an answer is left out, unless the answer is wanted. */
function messages(own, before) {
  const turns = own.turns.slice(0, own.turns.indexOf(before));
  const sent = turns.filter((turn, at) =>
    turn.role === "user" ? at === turns.length - 1 || turns[at + 1].content : turn.content);
  const system = byId("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  return [...first, ...sent.map(({ role, content }) => ({ role, content }))];
}

/** Asks for the answer to the last turn of the user, and shows the answer as it comes. */
async function answer() {
  const own = conversation;
  const turn = { role: "assistant", content: "", reasoning: "" };
  own.turns.push(turn);
  const view = show(turn);
  const stop = (stopping = new AbortController());
  list();
  keep(own);
  busy(true);
  try {
    await listen(own, turn, view.said, stop.signal);
  } catch (error) {
    if (error.name === "AbortError") turn.figures.reason = "stopped";
    else turn.error = { status: error.status ?? 0, code: error.code ?? "", message: error.message, id: error.id || turn.figures.id };
  }
  if (stopping === stop) stopping = null;
  busy(stopping !== null);
  await counted(turn.figures);
  settle(view, turn);
  keep(own);
}

async function listen(own, turn, said, signal) {
  const began = performance.now();
  const figures = (turn.figures = { id: "", reason: "incomplete" });
  let first = 0;
  const numbers = NUMBERS.filter((name) => byId(name).value.trim()).map((name) => [name, Number(byId(name).value)]);
  const options = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const body = { messages: messages(own, turn), ...Object.fromEntries(numbers), ...options };
  const begun = await stream("/v1/chat/completions", body, signal);
  figures.id = begun.id;
  for await (const { choices: [choice], usage } of begun.events) {
    Object.assign(figures, usage && {
      prompt_tokens: usage.prompt_tokens,
      completion_tokens: usage.completion_tokens,
      cached_tokens: usage.prompt_tokens_details?.cached_tokens,
    });
    if (!choice) continue;
    const now = performance.now();
    first ||= now;
    figures.ttft_s = (first - began) / 1000;
    if (figures.completion_tokens > 1) figures.tpot_s = (now - first) / 1000 / (figures.completion_tokens - 1);
    figures.reason = choice.finish_reason ?? figures.reason;
    turn.content += choice.delta.content ?? "";
    turn.reasoning += choice.delta.reasoning_content ?? "";
    said.textContent = turn.content || turn.reasoning;
  }
}

/** Asks the conductor for the cached tokens of an answer whose stream did not come to its end. */
async function counted(figures) {
  if (!figures.id || !figures.prompt_tokens || figures.cached_tokens !== undefined) return;
  try {
    const { timeline } = await get(`/moonpool/requests/${encodeURIComponent(figures.id)}`);
    figures.cached_tokens = timeline.usage.cached_tokens;
  } catch {
    // The conductor has forgotten the request.
  }
}

const details = (id) => el("a", { href: `#requests/${encodeURIComponent(id)}` }, "where the time went");

function problem({ status, code, message, id }) {
  const placed = !status || status === 429 || status >= 500; // others never came to the conductor
  const kind = [status ? `HTTP ${status}` : "", code].filter(Boolean).join(", ");
  return el("p", { class: "problem", role: "alert" }, `${kind ? `${kind}: ` : ""}${message} `,
    id && placed ? details(id) : null);
}

function note({ id, reason, prompt_tokens: prompts, cached_tokens: cached, completion_tokens: made, ttft_s: ttft, tpot_s: tpot }) {
  if (!prompts) return el("p", { class: "note" }, `${reason}, before the first token`);
  const parts = [
    reason,
    cached === undefined ? `${count(prompts)} prompt tokens` : `${count(cached)} of ${count(prompts)} prompt tokens from the cache`,
    `TTFT ${seconds(ttft)}`,
    tpot ? `TPOT ${seconds(tpot)}` : "",
    tpot ? `${count(made)} tokens, ${(1 / tpot).toFixed(1)} per second` : `${count(made)} tokens`,
  ];
  return el("p", { class: "note" }, `${parts.filter(Boolean).join(" · ")} · `, details(id));
}

/** The prompt's tokens; those that came from the cache are its beginning. */
function prompt(turn) {
  const own = conversation;
  const shown = el("details", {}, el("summary", {}, "The prompt's tokens"));
  shown.addEventListener("toggle", async () => {
    if (!shown.open || shown.childElementCount > 1) return;
    const tokens = el("div", { class: "prompt" });
    const key = [el("span", { class: "key fill-kept" }), "underlined: from the cache"];
    shown.append(el("p", { class: "note" }, key), tokens);
    try {
      const body = { messages: messages(own, turn), return_token_strs: true };
      const { token_strs: pieces } = await post("/tokenize", body);
      const cached = turn.figures.cached_tokens ?? 0;
      tokens.append(...pieces.map((piece, at) => el("span", at < cached ? { class: "cached" } : {}, piece)));
    } catch (error) {
      tokens.append(el("p", { class: "problem" }, error.message));
    }
  });
  return shown;
}
