// Markdown of answers: the gateway makes safe HTML of it, with no script, style, picture or other tag than a text needs.

import { post } from "./api.js";
import { button, copy, el } from "./dom.js";

const MAX_CHARS = 32768; // as the gateway's MAX_MARKDOWN_CHARS
const KEPT = 200;
const PAUSE_MS = 150; // between two renderings of a text that grows
const PAUSE_TIMES = 9; // as long as a rendering took: the gateway renders a tenth of the time at most
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const rendered = new Map();

/** The nodes of a text in Markdown; each block of code has a button that copies it. A text that is too long stays text. */
export async function markdown(text) {
  if (text.length > MAX_CHARS) return [new Text(text)];
  if (!rendered.has(text)) {
    const { html } = await post("/moonpool/markdown", { text });
    if (rendered.size >= KEPT) rendered.clear();
    rendered.set(text, html);
  }
  return nodesOf(rendered.get(text));
}

/** As `markdown`, of a text that still grows. */
async function unfinished(text) {
  return text.length > MAX_CHARS ? [new Text(text)] : nodesOf((await post("/moonpool/markdown", { text })).html);
}

function nodesOf(html) {
  const { body } = new DOMParser().parseFromString(html, "text/html");
  for (const code of body.querySelectorAll("pre > code")) {
    code.parentElement.replaceWith(block(code.className.replace("language-", ""), code));
  }
  for (const found of body.querySelectorAll("table")) frame(found, "wide-table", "Table");
  for (const found of body.querySelectorAll("math[display='block']")) frame(found, "formula", "Formula");
  return [...body.childNodes].filter((node) => node instanceof Element || node.data.trim());
}

/**
 * Gives an element these nodes behind its first `from` ones. What is equal already stays, and texts that go on are added to,
 * so that a selection, the place in a block that scrolls, and the focus are kept. With `cut`, nodes behind them go.
 */
export function redraw(parent, nodes, from = 0, cut = true) {
  nodes.forEach((node, at) => {
    const there = parent.childNodes[from + at];
    if (!there) parent.append(node);
    else if (there.isEqualNode(node)) return;
    else if (there instanceof Text && node instanceof Text) redrawText(there, node.data);
    else if (there instanceof Element && there.cloneNode().isEqualNode(node.cloneNode())) redraw(there, [...node.childNodes]);
    else there.replaceWith(node);
  });
  while (cut && parent.childNodes.length > from + nodes.length) parent.lastChild.remove();
}

function redrawText(there, data) {
  if (data.startsWith(there.data)) there.appendData(data.slice(there.data.length));
  else there.data = data;
}

/** Puts what may be wide into a box that scrolls. */
function frame(found, kind, name) {
  const box = el("div", { class: kind, tabindex: "0", role: "group", "aria-label": name });
  found.replaceWith(box);
  box.append(found);
}

function block(language, code) {
  const head = el("div", { class: "code-head" }, language, button("Copy code", ({ target }) => copy(target, target.closest(".code").querySelector("code"))));
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, code));
}

/** Draws a text in Markdown while it grows: what is whole is rendered once, the rest again and again. */
export class GrowingText {
  #element;
  #change;
  #done = 0; // characters that are drawn for good
  #nodes = 0; // of these characters
  #drawn = ""; // the text that is drawn
  #text = "";
  #busy = false;

  /** Draws into `element`; `change(draw)` calls `draw`, which changes the element's height. */
  constructor(element, change) {
    this.#element = element;
    this.#change = change;
  }

  /** The text is this now; it begins with the text before. */
  update(text) {
    if (!this.#text) {
      this.#element.classList.add("rendered");
      this.#element.replaceChildren();
    }
    this.#text = text;
    if (!this.#busy) this.#render();
  }

  async #render() {
    this.#busy = true;
    while (this.#drawn !== this.#text) {
      const text = this.#text;
      const end = whole(text, this.#done);
      if (end > this.#done) {
        const nodes = await rendering(markdown, text.slice(this.#done, end));
        redraw(this.#element, nodes, this.#nodes, false); // what follows is drawn below
        this.#nodes += nodes.length;
        this.#done = end;
      }
      const began = performance.now();
      const nodes = await rendering(unfinished, text.slice(this.#done));
      this.#change(() => redraw(this.#element, nodes, this.#nodes));
      this.#drawn = text;
      const pause = Math.max(PAUSE_MS, PAUSE_TIMES * (performance.now() - began));
      await new Promise((done) => { setTimeout(done, pause); });
    }
    this.#busy = false;
  }
}

const rendering = (how, text) => (text ? how(text).catch(() => [el("p", { class: "plain" }, text)]) : []);

/** The end of the last paragraph, list or block of code behind `from` to which nothing is added any more. */
function whole(text, from) {
  let end = from;
  let at = from;
  let fence = "";
  for (const line of text.slice(from).split("\n").slice(0, -1)) {
    at += line.length + 1;
    const mark = FENCE.exec(line)?.[1];
    if (!fence && mark) {
      if (at - line.length - 1 > end) end = at - line.length - 1;
      fence = mark;
    } else if (fence && mark && mark[0] === fence[0] && mark.length >= fence.length && !line.trim().slice(mark.length)) {
      fence = "";
      end = at;
    } else if (!fence && !line.trim() && !/^\s/.test(text.slice(at, at + 1))) {
      end = at;
    }
  }
  return end;
}
