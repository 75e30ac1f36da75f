// The chat: the conversation that is shown, what is asked, and the answer as it comes.

import { get, stream } from "./api.js";
import * as attached from "./attached.js";
import { find, newId, remember, save, shownBefore, watch } from "./conversations.js";
import { byId, button, toast } from "./dom.js";
import { GrowingText } from "./markdown.js";
import * as sidebar from "./sidebar.js";
import { note, settle, turnView } from "./turns.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const SETTINGS = ["system", ...NUMBERS];
const IDEAS = [
  "Explain what a KV cache is, in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "Make a table of three planets with their diameters.",
];
const END_PX = 80; // so near to its end, the view follows an answer
const KEEP_MS = 2000; // an answer that comes is kept so often

// {id, title, settings, turns, changed, revision}; a turn is {role, content}, of the user also {pictures, files}, of an
// answer also {model, reasoning, figures, error}.
let conversation = null;
let editing = null; // the user's turn that is edited
let stopping = null;
let unkept = null; // the conversation of which was told that not all of it is kept

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
  byId("text").addEventListener("input", fit);
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing) return;
    if (stopping) stopping.abort();
    else if (editing) edit(null);
  });
  byId("stop").addEventListener("click", () => stopping?.abort());
  byId("cancel").addEventListener("click", () => edit(null));
  byId("newest").addEventListener("click", () => follow());
  byId("scroll").addEventListener("scroll", () => { byId("newest").hidden = isAtEnd(); });
  // The composer grows with what is attached: the end that was in view stays in view.
  new ResizeObserver(() => byId("newest").hidden && follow()).observe(byId("ask"));
  byId("parameters").addEventListener("change", () => isValid() && keep(conversation));
  byId("ideas").append(...IDEAS.map((idea) => button(idea, () => {
    byId("text").value = idea;
    send();
  })));
  attached.start(() => read([...earlier(), {}]));
  sidebar.start((chosen) => open(chosen ?? fresh()));
  watch(changedElsewhere);
  open(shownBefore() ?? fresh());
}

const fresh = () => ({ id: newId(), settings: settings(), turns: [] });

const settings = () => Object.fromEntries(SETTINGS.map((name) => [name, byId(name).value]));

function open(wanted) {
  stopping?.abort();
  conversation = wanted;
  remember(wanted.id);
  for (const name of SETTINGS) byId(name).value = wanted.settings?.[name] ?? "";
  byId("talk").replaceChildren();
  edit(null);
  for (const turn of wanted.turns) settled(show(turn), turn);
  list();
  follow();
  byId("text").focus();
}

/** Another tab has kept the shown conversation, or removed it: its turns are shown here too, unless an answer comes. */
function changedElsewhere(id, other) {
  if (id === conversation.id && !stopping && !editing) open(other ?? fresh());
  else list();
}

/** Saves a conversation, unless there is nothing in it, or it was deleted while its answer came. */
function keep(own) {
  if (own === conversation) own.settings = settings();
  else if (!find(own.id)) return;
  if (!own.turns.length) return;
  if (!save(own) && unkept !== own.id) {
    unkept = own.id;
    toast("This browser has no more room: not all of this conversation is kept.");
  }
  if (own === conversation) remember(own.id);
}

/** Fills the list of conversations, and says what the page is for while there is nothing to show. */
function list() {
  sidebar.list(conversation);
  byId("hint").hidden = conversation.turns.length > 0;
}

const isAtEnd = () => {
  const { scrollHeight, scrollTop, clientHeight } = byId("scroll");
  return scrollHeight - scrollTop - clientHeight < END_PX;
};

/** Shows the end of the conversation. */
function follow() {
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
  byId("newest").hidden = true;
}

/** Gives the box the height of its text, within bounds. */
function fit() {
  const box = byId("text");
  box.rows = Math.min(8, Math.max(1, box.value.split("\n").length));
}

/** Puts a turn of the user into the box, whence it is sent anew; null: no longer. */
function edit(turn) {
  if (editing || turn) {
    byId("text").value = turn?.content ?? "";
    attached.put(turn ? attached.attachedTo(turn) : []);
  }
  editing = turn;
  fit();
  byId("cancel").hidden = !turn;
  byId("text-label").textContent = turn ? "Edit: what followed this turn is replaced" : "Your turn";
  byId("text-label").classList.toggle("unseen", !turn);
  if (turn) byId("text").focus();
}

/** Takes away a turn and all that follow. */
function cut(turn) {
  const at = conversation.turns.indexOf(turn);
  conversation.turns.length = at;
  while (byId("talk").childElementCount > at) byId("talk").lastElementChild.remove();
}

/** Whether each parameter is within its bounds; else says which is not. */
function isValid() {
  const wrong = NUMBERS.map(byId).find((input) => !input.checkValidity());
  byId("ask-problem").hidden = !wrong;
  if (!wrong) return true;
  byId("ask-problem").textContent = `${wrong.id}: ${wrong.validationMessage}`;
  byId("options").open = true;
  wrong.focus();
  return false;
}

function send() {
  if (attached.ready()) {
    attached.ready().then(send);
    return;
  }
  const said = byId("text").value.trim();
  if ((!said && attached.isEmpty()) || stopping || !isValid()) return;
  const more = attached.taken(earlier());
  if (editing) cut(editing);
  edit(null);
  byId("text").value = "";
  fit();
  const turn = { role: "user", content: said, ...more };
  conversation.turns.push(turn);
  settled(show(turn), turn);
  answer();
}

function show(turn) {
  const again = () => { cut(turn); edit(null); answer(); };
  const view = turnView(turn, turn.role === "user" ? ["Edit", () => edit(turn)] : ["Regenerate", again]);
  byId("talk").append(view.shown);
  return view;
}

function settled(view, turn) {
  const own = conversation;
  settle(view, turn, () => messages(own, turn));
}

function busy(now) {
  byId("send").hidden = now;
  byId("stop").hidden = !now;
  byId("talk").setAttribute("aria-busy", String(now));
}

/** The turns that the model reads. A turn of the user without an answer is left out, unless the turn is the last. */
const read = (turns) => turns.filter((turn, at) =>
  turn.role === "user" ? at === turns.length - 1 || turns[at + 1].content : turn.content);

/** The turns before the one that is being written. */
const earlier = () => conversation.turns.slice(0, editing ? conversation.turns.indexOf(editing) : undefined);

/** What the model reads before a turn. */
function messages(own, turn) {
  const sent = read(own.turns.slice(0, own.turns.indexOf(turn)));
  const system = byId("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  return [...first, ...sent.map((each) => ({ role: each.role, content: attached.content(each) }))];
}

/** Asks for the answer to the last turn of the user, and shows the answer as it comes. */
async function answer() {
  const own = conversation;
  const turn = { role: "assistant", content: "", reasoning: "", model: byId("model").value };
  own.turns.push(turn);
  const view = show(turn);
  const stop = (stopping = new AbortController());
  keep(own);
  list();
  busy(true);
  follow();
  try {
    await listen(own, turn, view, stop.signal);
  } catch (error) {
    if (error.name === "AbortError") turn.figures.reason = "stopped";
    else turn.error = { status: error.status ?? 0, code: error.code ?? "", message: error.message, id: error.id || turn.figures.id };
  }
  if (stopping === stop) stopping = null;
  busy(stopping !== null);
  await located(turn.figures);
  const follows = own === conversation && isAtEnd();
  settle(view, turn, () => messages(own, turn));
  keep(own);
  if (own !== conversation) return;
  list();
  if (follows) follow();
}

async function listen(own, turn, { said, more }, signal) {
  const began = performance.now();
  const figures = (turn.figures = { id: "", reason: "incomplete" });
  const following = (draw) => {
    const follows = isAtEnd();
    draw();
    if (follows && own === conversation) follow();
  };
  const drawn = new GrowingText(said, following);
  let [first, kept] = [0, began];
  const numbers = NUMBERS.filter((name) => byId(name).value.trim()).map((name) => [name, Number(byId(name).value)]);
  const options = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const model = turn.model ? { model: turn.model } : {};
  const body = { ...model, messages: messages(own, turn), ...Object.fromEntries(numbers), ...options };
  const begun = await stream("/v1/chat/completions", body, signal);
  figures.id = begun.id;
  for await (const { choices: [choice], usage } of begun.events) {
    Object.assign(figures, usage && {
      prompt_tokens: usage.prompt_tokens,
      completion_tokens: usage.completion_tokens,
      cached_tokens: usage.prompt_tokens_details?.cached_tokens ?? figures.cached_tokens,
    });
    if (!choice) continue;
    const now = performance.now();
    if (!first) {
      first = now;
      located(figures); // so that the figures tell where while the answer comes
    }
    figures.ttft_s = (first - began) / 1000;
    if (figures.completion_tokens > 1) figures.tpot_s = (now - first) / 1000 / (figures.completion_tokens - 1);
    figures.reason = choice.finish_reason ?? figures.reason;
    turn.content += choice.delta.content ?? "";
    turn.reasoning += choice.delta.reasoning_content ?? "";
    if (turn.content) drawn.update(turn.content);
    following(() => {
      if (!turn.content) said.textContent = turn.reasoning;
      more.replaceChildren(note({ ...figures, reason: "" }));
    });
    if (now - kept > KEEP_MS) {
      kept = now;
      keep(own);
    }
  }
}

/** Asks the conductor where an answer was computed, and for its cached tokens if its stream did not come to its end. */
async function located(figures) {
  if (!figures.id || !figures.prompt_tokens) return;
  try {
    const { timeline, placement } = await get(`/moonpool/requests/${encodeURIComponent(figures.id)}`);
    figures.cached_tokens ??= timeline.usage.cached_tokens;
    if (placement) figures.where = placement.prefill === placement.decode || !placement.decode
      ? placement.prefill : `${placement.prefill} → ${placement.decode}`;
  } catch {
    // The conductor has forgotten the request.
  }
}
