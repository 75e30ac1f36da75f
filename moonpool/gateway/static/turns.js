// How a turn of a conversation is drawn, and what is told below an answer.

import { post } from "./api.js";
import { drawn } from "./attached.js";
import { button, copy, count, el, seconds } from "./dom.js";
import { markdown, redraw } from "./markdown.js";

// Turns are rendered when they come near the window: a long conversation opens at once.
const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    target.render?.();
  }
}, { rootMargin: "1000px" });

/** Draws a turn; returns the elements that change. `change` is what its button does: [text, pressed]. */
export function turnView(turn, [label, pressed]) {
  const own = turn.role === "user";
  const view = { said: el("div", { class: "said" }), more: el("div") };
  const actions = el("div", { class: "actions" },
    button("Copy", ({ target }) => copy(target, view.said, turn.content)), button(label, pressed, { class: "change" }));
  view.shown = el("article", { class: `turn ${turn.role}` }, el("h2", {}, own ? "You" : turn.model || "Model"), own ? drawn(turn) : null, view.said, view.more, actions);
  return view;
}

/** Draws a turn that no longer changes: its Markdown, its figures, why it failed. `messages` are its prompt's. */
export function settle({ shown, said, more }, turn, messages) {
  if (turn.role === "user") {
    said.textContent = turn.content;
    return;
  }
  if (!said.classList.contains("rendered")) said.textContent = turn.content;
  shown.render = async () => {
    const nodes = await markdown(turn.content).catch(() => [new Text(turn.content)]); // without the gateway, text stays text
    redraw(said, nodes);
    said.classList.toggle("rendered", nodes[0] instanceof Element);
  };
  if (turn.content) near.observe(shown);
  more.replaceChildren(...[
    turn.reasoning ? el("details", {}, el("summary", {}, "Thinking"), el("p", { class: "said" }, turn.reasoning)) : null,
    turn.error ? problem(turn.error) : null,
    turn.figures && (turn.figures.prompt_tokens || !turn.error) ? note(turn.figures) : null,
    turn.figures?.prompt_tokens ? prompt(turn, messages) : null,
  ].filter((part) => part !== null));
}

const details = (id) => el("a", { href: `#requests/${encodeURIComponent(id)}` }, "where the time went");

function problem({ status, code, message, id }) {
  const placed = !status || status === 429 || status >= 500; // others never came to the conductor
  const kind = [status ? `HTTP ${status}` : "", code].filter(Boolean).join(", ");
  return el("p", { class: "problem", role: "alert" }, `${kind ? `${kind}: ` : ""}${message} `,
    id && placed ? details(id) : null);
}

/** The figures of an answer; while the answer comes, without its reason. */
export function note({ id, reason, where, prompt_tokens: prompts, cached_tokens: cached, completion_tokens: made, ttft_s: ttft, tpot_s: tpot }) {
  if (!prompts) return el("p", { class: "note" }, reason ? `${reason}, before the first token` : "…");
  const parts = [
    reason,
    cached === undefined ? `${count(prompts)} prompt tokens` : `${count(cached)} of ${count(prompts)} prompt tokens from the cache`,
    `TTFT ${seconds(ttft)}`,
    tpot ? `TPOT ${seconds(tpot)}` : "",
    tpot ? `${count(made)} tokens, ${(1 / tpot).toFixed(1)} per second` : `${count(made)} tokens`,
    where,
  ];
  const told = parts.filter(Boolean).map((text, at) => [at ? " · " : "", el("span", {}, text)]);
  return el("p", { class: "note" }, told, reason ? [" · ", details(id)] : null);
}

/** The prompt's tokens; those that came from the cache are its beginning. */
function prompt(turn, messages) {
  const shown = el("details", {}, el("summary", {}, "The prompt's tokens"));
  shown.addEventListener("toggle", async () => {
    if (!shown.open || shown.childElementCount > 1) return;
    const tokens = el("div", { class: "prompt" });
    const key = [el("span", { class: "key fill-kept" }), "underlined: from the cache"];
    shown.append(el("p", { class: "note" }, key), tokens);
    try {
      const { token_strs: pieces } = await post("/tokenize", { messages: messages(), return_token_strs: true });
      const cached = turn.figures.cached_tokens ?? 0;
      tokens.append(...pieces.map((piece, at) => el("span", at < cached ? { class: "cached" } : {}, piece)));
    } catch (error) {
      tokens.append(el("p", { class: "problem" }, error.message));
    }
  });
  return shown;
}
