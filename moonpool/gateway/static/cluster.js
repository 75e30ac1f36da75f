// The cluster's map: figures of the last minute, and every instance with what it holds.

import { get } from "./api.js";
import { bar, byId, bytes, count, el, percent, seconds, svg } from "./dom.js";

const EVERY_MS = 1000;
const KEPT = 120; // points of a curve
const curves = {}; // by name: the newest value last
let timer = null;

export function show() {
  look();
}

export function hide() {
  clearTimeout(timer);
  timer = null;
}

async function look() {
  clearTimeout(timer);
  try {
    if (!document.hidden) draw(await get("/moonpool/state"));
    byId("cluster-problem").hidden = true;
  } catch (error) {
    byId("cluster-problem").textContent = error.message;
    byId("cluster-problem").hidden = false;
  }
  if (!byId("cluster").hidden) timer = setTimeout(look, EVERY_MS);
}

function draw(state) {
  byId("flow").replaceChildren(...flow(state));
  byId("figures").replaceChildren(...figures(state));
  const role = (each) => (each.computes_prompts ? "both" : each.kind);
  const groups = ["prefill", "decode", "both", "kvstore"].map((name) => [name, state.instances.filter((each) => role(each) === name)]);
  byId("map").replaceChildren(...groups.filter(([, found]) => found.length).map(([kind, found]) =>
    el("div", { class: "kind" }, el("h2", {}, kind), found.map(instance))));
}

/** Whether a decode instance computes whole prompts, too. */
const isBoth = (each) => Boolean(each.computes_prompts);

/** The way of a request, with what each station does now. */
function flow({ recent, queue, instances }) {
  const of = (kind) => instances.filter((each) => each.kind === kind || (kind === "prefill" && each.computes_prompts));
  const sum = (found, name) => found.reduce((total, each) => total + (each[name] ?? 0), 0);
  const window = recent.window_s || 1;
  const [prefills, decodes, stores] = ["prefill", "decode", "kvstore"].map(of);
  const kept = sum(instances.filter((each) => each.kind !== "kvstore"), "cached_blocks");
  const stored = stores.flatMap(({ tiers }) => tiers).reduce((total, { blocks }) => total + blocks, 0);
  const many = (number, name) => `${count(number)} ${name}${number === 1 ? "" : "s"}`;
  const stations = [
    station("clients", recent.requests / window, "answered per second", (value) => value.toFixed(1)),
    station("conductor", queue.for_limits + queue.for_room, "wait for a place"),
    prefills.length ? station(many(prefills.length, "prefill"), sum(prefills, "queued_tokens"), "prompt tokens queued") : null,
    station("KV pool", kept + stored, `blocks kept, ${percent(recent.usage.cached_tokens, recent.usage.prompt_tokens)} of prompts from here`),
    decodes.length ? station(many(decodes.length, decodes.some(isBoth) ? "engine" : "decode"), sum(decodes, "running"),
      `answers run, ${(recent.usage.completion_tokens / window).toFixed(1)} tokens/s`) : null,
  ].filter((part) => part !== null);
  return stations.flatMap((part, at) => (at ? [el("span", { "aria-hidden": "true" }, "→"), part] : [part]));
}

const station = (name, value, more, shown = count) => el("article", {}, el("h2", {}, name),
  el("p", { class: "big" }, shown(value)), el("p", { class: "note" }, more), curve(name, value));

function figures({ recent, queue, conductor, emulated, ready }) {
  const { usage, window_s: window } = recent;
  const hits = usage.prompt_tokens ? usage.cached_tokens / usage.prompt_tokens : 0;
  const rate = (value) => (window ? (value / window).toFixed(1) : "0");
  const waiting = queue.for_limits + queue.for_room;
  return [
    figure("TTFT, half are below", seconds(recent.ttft_s.p50), `p99 ${seconds(recent.ttft_s.p99)}`, recent.ttft_s.p50),
    figure("TPOT, half are below", seconds(recent.tpot_s.p50), `p99 ${seconds(recent.tpot_s.p99)}`, recent.tpot_s.p50),
    figure("Prompt tokens from the cache", percent(usage.cached_tokens, usage.prompt_tokens),
      `${count(usage.cached_tokens)} of ${count(usage.prompt_tokens)}`, hits),
    figure("Answered per second", rate(recent.requests), `${rate(usage.completion_tokens)} tokens`, usage.completion_tokens / (window || 1)),
    figure("Waiting at the conductor", count(waiting), `${queue.for_limits} for limits, ${queue.for_room} for room`),
    figure("Conductor", ready ? "ready" : "not ready", emulated ? `${conductor}, emulated: ${emulated}` : conductor),
  ];
}

function figure(name, value, more, point = null) {
  const text = el("dl", {}, el("dt", {}, name), el("dd", {}, value, " ", el("small", {}, more)));
  return el("div", { class: "figure" }, text, point === null ? null : curve(name, point));
}

/** The history of a figure, whose value now is given; the newest to the right. */
function curve(name, now) {
  const points = (curves[name] = [...(curves[name] ?? []), now].slice(-KEPT));
  const top = Math.max(...points) || 1;
  const x = (at) => 100 - (100 * (points.length - 1 - at)) / (KEPT - 1);
  const line = points.map((value, at) => `${x(at)},${29 - (27 * value) / top}`).join(" ");
  const frame = { viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" };
  const look = { points: line, fill: "none", stroke: "currentColor", "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" };
  return svg("svg", frame, svg("polyline", look));
}

function instance(each) {
  const busy = `${count(each.running)} running, ${count(each.waiting)} waiting`;
  const queued = each.queued_tokens ? `, ${count(each.queued_tokens)} tokens queued` : "";
  const about = [each.address, isBoth(each) ? "prompts and answers" : "", each.draining ? "draining" : ""];
  const title = el("h3", {}, each.id, " ", el("small", {}, about.filter(Boolean).join(", ")));
  return el("article", { class: "instance" }, title, el("p", { class: "note" }, busy + queued),
    each.tiers.length ? each.tiers.map(tier) : each.total_blocks ? pool(each) : null);
}

function pool(each) {
  const { total_blocks: total, free_blocks: free, cached_blocks: cached, promised_blocks: promised } = each;
  const used = Math.max(0, total - free - cached);
  const parts = [["used", used / total], ["kept", cached / total], ["promised", Math.min(promised, free) / total]];
  const label = `KV pool: ${count(used)} blocks in use, ${count(cached)} kept for reuse, ${count(promised)} promised, of ${count(total)}`;
  return [bar(parts, label), el("p", { class: "note" },
    entry("used", `${count(used)} in use`), entry("kept", `${count(cached)} kept`),
    promised ? entry("promised", `${count(promised)} promised`) : null, `of ${count(total)} blocks`)];
}

function tier({ name, blocks, used_bytes: used, capacity_bytes: size }) {
  const label = `${name.toUpperCase()}: ${count(blocks)} blocks, ${bytes(used)} of ${bytes(size)}`;
  return [bar([["kept", size ? used / size : 0]], label), el("p", { class: "note" }, label)];
}

function entry(kind, text) {
  return el("span", {}, el("span", { class: `key fill-${kind}` }), `${text}, `);
}
