// Elements without HTML text: what comes from a model or a cluster is never read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children: texts, elements, or nothing (null). */
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** As `el`, of a drawing. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.flat(Infinity).filter((child) => child !== null));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** A button that submits nothing. */
export function button(text, pressed, attributes = {}) {
  const made = el("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", pressed);
  return made;
}

const TOAST_MS = 8000;
let toasting = 0;

/** Says something at the window's edge for a while, with a button if `action` names one. */
export function toast(text, action = "", pressed = () => {}) {
  const shown = byId("toast");
  const done = () => { shown.hidden = true; };
  shown.replaceChildren(text, action ? button(action, () => { done(); pressed(); }) : "");
  shown.hidden = false;
  clearTimeout(toasting);
  toasting = setTimeout(done, TOAST_MS);
}

const COPIED_MS = 2000;

/** Copies `text`, else what an element says. Selects the element where a browser forbids that, as it does without HTTPS. */
export async function copy(pressed, element, text = element.textContent) {
  const label = pressed.textContent;
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(element);
    pressed.textContent = "Selected";
  }
  setTimeout(() => { pressed.textContent = label; }, COPIED_MS);
}

/** A bar of parts `[class, share]`; the label is for those who cannot see it. */
export function bar(parts, label) {
  let x = 0;
  const drawn = parts.map(([kind, share]) => {
    const rect = svg("rect", { class: `fill-${kind}`, x: 100 * x, y: 0, width: 100 * Math.max(0, share), height: 10 });
    x += share;
    return rect;
  });
  const track = svg("rect", { class: "track", x: 0, y: 0, width: 100, height: 10 });
  const frame = { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label };
  return svg("svg", frame, track, drawn);
}

/** A table with a caption; a cell is text, an element, or a number, which stands to the right as its head does. */
export function table(caption, heads, rows) {
  const kind = (value) => {
    if (value instanceof Node) return value.classList.contains("bar") ? "bar-cell" : "short";
    return typeof value === "number" ? "number" : value.length < 12 ? "short" : "text";
  };
  const cell = (value) => el("td", { class: kind(value) }, typeof value === "number" ? count(value) : value);
  const head = el("tr", {}, heads.map((text, at) => el("th", { scope: "col", class: kind(rows[0]?.[at] ?? "") }, text)));
  const body = el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))));
  return el("div", { class: "wide-table", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", {}, caption), el("thead", {}, head), body));
}

export const count = (number) => Math.round(number).toLocaleString("en");

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

/** Seconds as a person reads them; none where they are 0. */
export function seconds(value) {
  if (!value) return "–";
  return value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  for (; value >= 1024 && step < units.length - 1; step++) value /= 1024;
  return `${value.toFixed(step && value < 100 ? 1 : 0)} ${units[step]}`;
}
