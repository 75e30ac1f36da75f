// Markdown of answers: the gateway makes safe HTML of it, with no script, style, picture or other tag than a text needs.

import { post } from "./api.js";
import { button, copy, el } from "./dom.js";

const MAX_CHARS = 32768; // as the gateway's MAX_MARKDOWN_CHARS
const KEPT = 200;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const rendered = new Map();

/** The nodes of a text in Markdown; each block of code has a button that copies it. A text that is too long stays text. */
export async function markdown(text) {
  if (text.length > MAX_CHARS) return [text];
  if (!rendered.has(text)) {
    const { html } = await post("/moonpool/markdown", { text });
    if (rendered.size >= KEPT) rendered.clear();
    rendered.set(text, html);
  }
  const { body } = new DOMParser().parseFromString(rendered.get(text), "text/html");
  for (const code of body.querySelectorAll("pre > code")) {
    code.parentElement.replaceWith(block(code.className.replace("language-", ""), code));
  }
  for (const found of body.querySelectorAll("table")) {
    const frame = el("div", { class: "wide-table", tabindex: "0", role: "region", "aria-label": "Table" });
    found.replaceWith(frame);
    frame.append(found);
  }
  return [...body.childNodes];
}

function block(language, code) {
  const head = el("div", { class: "code-head" }, language, button("Copy code", ({ target }) => copy(target, code)));
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, code));
}

/** Draws a text in Markdown while it grows: what is whole is rendered once, the rest stays text until it is whole. */
export class GrowingText {
  #element;
  #rest = el("div", { class: "rest" });
  #done = 0; // characters that are drawn for good
  #text = "";
  #busy = false;

  constructor(element) {
    this.#element = element;
    element.classList.add("rendered");
    element.replaceChildren(this.#rest);
  }

  /** The text is this now; it begins with the text before. */
  update(text) {
    this.#text = text;
    this.#draw();
    if (!this.#busy) this.#render();
  }

  #draw() {
    const rest = this.#text.slice(this.#done);
    const opened = FENCE.exec(rest);
    if (!opened) {
      this.#rest.replaceChildren(rest);
      return;
    }
    const [first, ...lines] = rest.split("\n");
    const language = first.trim().replace(/^[`~]+/, "").trim();
    this.#rest.replaceChildren(block(language, el("code", {}, lines.join("\n"))));
  }

  async #render() {
    this.#busy = true;
    for (let end = whole(this.#text, this.#done); end > this.#done; end = whole(this.#text, this.#done)) {
      const part = this.#text.slice(this.#done, end);
      const nodes = await markdown(part).catch(() => [part]);
      this.#rest.before(...nodes);
      this.#done = end;
      this.#draw();
    }
    this.#busy = false;
  }
}

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
