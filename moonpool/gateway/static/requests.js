// Where a request's time went, the requests that ended lately, and what was refused, failed or cancelled.

import { get, text } from "./api.js";
import { byId, bytes, count, el, seconds, table } from "./dom.js";
import { timelineChart } from "./timeline.js";

let ended = [];

export function start() {
  byId("find").addEventListener("submit", (event) => {
    event.preventDefault();
    const name = byId("name").value.trim();
    if (name) location.hash = `requests/${encodeURIComponent(name)}`;
  });
  byId("find").addEventListener("input", list);
}

export async function show(name) {
  problem("");
  try {
    ended = (await get("/moonpool/requests")).requests;
    list();
    byId("failures").replaceChildren(failures(await text("/metrics")));
    byId("story").replaceChildren();
    const shown = name || ended.find((each) => outcome(each) === "answered")?.request_id; // else the newest answer's
    if (shown) byId("story").replaceChildren(...story(await get(`/moonpool/requests/${encodeURIComponent(shown)}`)));
  } catch (error) {
    problem(error.message);
    byId("story").replaceChildren();
  }
}

function problem(said) {
  byId("request-problem").textContent = said;
  byId("request-problem").hidden = !said;
}

/** Shows the requests that the search finds. */
function list() {
  const sought = byId("name").value.trim().toLowerCase();
  const kind = byId("kind").value;
  const found = ended.filter((each) =>
    (!kind || kind === outcome(each)) && [each.request_id, each.tenant, reason(each)].join("\n").toLowerCase().includes(sought));
  byId("lately").replaceChildren(lately(found));
}

function outcome({ refused, failed, cancelled }) {
  return refused ? "refused" : failed ? "failed" : cancelled ? "cancelled" : "answered";
}

/** Why a request has no whole answer. */
function reason({ refused, failed, cancelled }) {
  return refused || failed || (cancelled ? "cancelled" : "");
}

function lately(requests) {
  if (!requests.length) return el("p", { class: "hint" }, ended.length ? "None of the last ones. An older one is shown by its whole id." : "None yet.");
  const rows = requests.map(({ request_id: id, tenant, usage, timing, ...why }) => [
    el("a", { href: `#requests/${encodeURIComponent(id)}` }, id), tenant || "–",
    usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, seconds(timing.ttft_s), seconds(timing.e2e_s),
    reason(why),
  ]);
  return table("The newest first", ["request", "tenant", "prompt", "cached", "answer", "TTFT", "end", "refused, failed or cancelled"], rows);
}

/** Error responses of this gateway by status and code, of all its clients. */
function failures(metrics) {
  const counts = metrics.matchAll(/^moonpool_gateway_refused_total\{(.*)\} (\S+)$/gm);
  const rows = [...counts].map(([, labels, value]) => {
    const label = (name) => labels.match(new RegExp(`\\b${name}="([^"]*)"`))?.[1] ?? "";
    return [label("status"), label("code") || "–", Number(value)];
  });
  if (!rows.length) return el("p", { class: "hint" }, "None since this gateway started.");
  return table("By this gateway since it started", ["HTTP status", "reason", "responses"], rows);
}

function story(found) {
  const { timeline, phases, placement, refused, failed, cancelled, attempts } = found;
  const { usage, timing } = timeline;
  if (!placement) {
    const why = refused ? `Refused: ${refused}` : cancelled ? "Cancelled before it was placed." : `Failed before it was placed: ${failed}`;
    return [el("p", {}, why), candidates(found)];
  }
  const where = placement.prefill === placement.decode
    ? `on ${placement.decode} alone` : `on ${placement.prefill}, then ${placement.decode || "nowhere: one token was all"}`;
  const source = placement.kvstore ? `, prefix from ${placement.kvstore}` : "";
  const transport = found.transport ? ` over ${found.transport}` : "";
  const sent = timeline.sent_bytes ? ` ${bytes(timeline.sent_bytes)} of KV went to decode${transport}.` : "";
  const came = timeline.arrived_at ? new Date(1000 * timeline.arrived_at).toLocaleTimeString() : "";
  return [
    el("h2", {}, `Request ${found.request_id}`),
    el("p", {}, `Came at ${came}, placed ${where}${source}. ${count(usage.prompt_tokens)} prompt tokens, ` +
      `${count(usage.cached_tokens)} of them from the cache; ${count(usage.completion_tokens)} tokens of answer. ` +
      `TTFT ${seconds(timing.ttft_s)} (predicted ${seconds(attempts[0].placement.predicted_ttft_s)}), ` +
      `TPOT ${seconds(timing.tpot_s)} (predicted ${seconds(placement.predicted_tpot_s)}), ` +
      `end ${seconds(timing.e2e_s)}.${sent}`),
    ...attempts.slice(1).map((attempt) => el("p", {}, `Placed again at ${seconds(attempt.placed_s)}, because ` +
      `${attempt.cause}: ${count(attempt.prompt_tokens)} tokens to compute or find, ` +
      `${count(attempt.local_tokens + attempt.loaded_tokens)} of them found, ${count(attempt.tokens)} new tokens.`)),
    failed ? el("p", {}, `Failed: ${failed}.`) : null,
    cancelled ? el("p", {}, "Cancelled: the client stopped the request, or left.") : null,
    timing.e2e_s ? null : el("p", { class: "hint" }, "It still runs."),
    phases.length ? timelineChart(found) : null,
    candidates(found),
  ].filter((part) => part !== null);
}

function candidates({ candidates: found, placement, policy }) {
  if (!found.length) return el("p", { class: "hint" }, "Nothing was weighed for its prefill.");
  const total = (each) => each.queue_s + each.load_s + each.prefill_s + each.overhead_s;
  const rows = found.map((each) => [
    each.instance, each.local_blocks, each.used_blocks,
    ...(each.excluded ? ["–", "–", "–", "–"] : [each.queue_s, each.load_s, each.prefill_s, total(each)].map(seconds)),
    each.excluded || (each.instance === placement?.prefill ? "chosen" : ""),
  ]);
  const heads = ["instance", "own blocks", "used blocks", "queue", "load", "compute", "TTFT", "why"];
  return el("div", {}, el("h2", {}, "Where its prefill could have run"), table(`Predicted; policy ${policy}`, heads, rows));
}
