// "See it": one long document asked twice, first computed, then out of the pool, with both timelines.

import { ask as send, get } from "./api.js";
import { byId, count, el, percent, seconds } from "./dom.js";
import { lastEnd, timelineBar } from "./timeline.js";

const WORDS = ("river stone paper winter garden market letter engine summer copper silver signal harbour window forest " +
  "mountain lantern bridge cotton orchard thunder compass velvet anchor meadow ribbon castle candle marble willow").split(" ");
const MOST_WORDS = 1500;
const SHARE = 0.4; // of the model's context; a word is about 1.3 tokens
const ANSWER_TOKENS = 24;
const TRIES = 20; // the conductor learns of a request's end a moment after the client does
const AGAIN_MS = 100;

export function start() {
  byId("see-start").addEventListener("click", ask);
}

async function ask() {
  byId("see-start").disabled = true;
  byId("see-problem").hidden = true;
  byId("see-result").replaceChildren(el("p", { class: "hint" }, "Asking for the first time …"));
  try {
    const body = await request();
    const cold = await asked(body);
    byId("see-result").replaceChildren(el("p", { class: "hint" }, "Asking for the second time …"));
    draw(cold, await asked(body));
  } catch (error) {
    byId("see-result").replaceChildren();
    byId("see-problem").textContent = error.message;
    byId("see-problem").hidden = false;
  }
  byId("see-start").disabled = false;
}

/** A question about a document that no cache can hold: its words are drawn anew. */
async function request() {
  const { data } = await get("/v1/models");
  const words = Math.min(MOST_WORDS, Math.floor((SHARE * (data[0].max_model_len ?? 4096)) / 1.3));
  const drawn = Array.from({ length: words }, () => WORDS[Math.floor(Math.random() * WORDS.length)]);
  const text = `Here is a list of words.\n\n${drawn.join(" ")}\n\nWhich of these words do you like best?`;
  const model = byId("model").value ? { model: byId("model").value } : {};
  return { ...model, messages: [{ role: "user", content: text }], max_tokens: ANSWER_TOKENS, temperature: 0 };
}

/** The timeline of a request that is asked now. */
async function asked(body) {
  const id = await send("/v1/chat/completions", body);
  for (let tries = 1; ; tries++) {
    try {
      const found = await get(`/moonpool/requests/${encodeURIComponent(id)}`);
      if (found.timeline.timing.e2e_s || tries === TRIES) return found;
    } catch (error) {
      if (tries === TRIES) throw error;
    }
    await new Promise((done) => { setTimeout(done, AGAIN_MS); });
  }
}

function draw(cold, warm) {
  const [before, after] = [cold, warm].map(({ timeline }) => timeline.timing.ttft_s);
  const end = Math.max(lastEnd(cold.phases), lastEnd(warm.phases));
  const sooner = before / after;
  const head = sooner > 1
    ? el("p", { class: "sooner" }, el("strong", {}, `${sooner.toFixed(1)} times`), " sooner to the first token")
    : el("p", { class: "sooner" }, "Not sooner this time: the prompt is short, or the machine was busy.");
  const rows = [["First: computed", cold], ["Second: out of the pool", warm]];
  byId("see-result").replaceChildren(head,
    el("div", { class: "figure" }, rows.map(([title, found]) => line(title, found, end)), legend(cold, warm)),
    el("div", { class: "pair" }, rows.map(([title, found]) => half(title, found))));
}

function line(title, found, end) {
  const { ttft_s: ttft } = found.timeline.timing;
  return el("div", { class: "see-line" }, el("p", {}, title), timelineBar(found, end, `${title}: first token after ${seconds(ttft)}`));
}

function legend(...requests) {
  const names = Object.assign({}, ...requests.map(({ phases, names: all }) =>
    Object.fromEntries(phases.map(({ name }) => [name, all[name]]))));
  return el("p", { class: "note" }, Object.entries(names).map(([name, text]) =>
    el("span", { class: "entry" }, el("span", { class: `key fill-${name}` }), text)));
}

function half(title, found) {
  const { usage, timing } = found.timeline;
  const where = found.placement ? ` on ${found.placement.prefill}` : "";
  return el("article", { class: "figure" }, el("h3", {}, title),
    el("p", { class: "big" }, seconds(timing.ttft_s), " ", el("small", {}, "to the first token")),
    el("p", { class: "note" }, `${count(usage.cached_tokens)} of ${count(usage.prompt_tokens)} prompt tokens ` +
      `(${percent(usage.cached_tokens, usage.prompt_tokens)}) from the cache${where}. `,
      el("a", { href: `#requests/${encodeURIComponent(found.request_id)}` }, "All about this request")));
}
