// The phases of a request on a line of time.

import { bar, el, seconds, svg, table } from "./dom.js";

/** A row per phase, all on one line of time that ends at `end_s`; without it, where the request ends. */
export function timelineChart({ phases, names, timeline }, end_s = 0) {
  const end = end_s || lastEnd(phases);
  const rows = phases.map((phase) => {
    const [begin, took] = [phase.begin_s / end, (phase.end_s - phase.begin_s) / end];
    const label = `${names[phase.name]}: from ${seconds(phase.begin_s)} for ${seconds(phase.end_s - phase.begin_s)}`;
    const drawn = bar([["nothing", begin], [phase.name, Math.max(took, 0.003)]], label);
    drawn.querySelector(".fill-nothing").setAttribute("fill", "none");
    if (phase.name === "steps") drawn.append(...timeline.token_s.map((at) => tick(at / end)));
    return [names[phase.name], phase.tokens ? phase.tokens : "", seconds(phase.begin_s),
      seconds(phase.end_s - phase.begin_s), drawn];
  });
  return el("div", { class: "phases" },
    table("Phases: tokens, when each began since the request came, and how long it took", ["phase", "tokens", "from", "for", "on a line of time"], rows));
}

/** All phases in one bar on a line of time that ends at `end_s`. */
export function timelineBar({ phases }, end_s, label) {
  const drawn = bar([], label);
  drawn.append(...phases.map(({ name, begin_s: begin, end_s: end }) => svg("rect", {
    class: `fill-${name}`, x: (100 * begin) / end_s, width: Math.max(0.3, (100 * (end - begin)) / end_s),
    ...(name === "stream" ? { y: 7, height: 3 } : { y: 0, height: 10 }), // KV streams while steps compute
  })));
  return drawn;
}

/** When a request's last phase ends, seconds since the request came. */
export const lastEnd = (phases) => Math.max(...phases.map((phase) => phase.end_s), 0) || 1;

function tick(share) {
  return svg("line", { class: "tick", x1: 100 * share, x2: 100 * share, y1: 0, y2: 10 });
}
