// Markdown of answers: the gateway makes safe HTML of it, with no script, style, picture or other tag than a text needs.

import { post } from "./api.js";
import { button, copy, el } from "./dom.js";

const MAX_CHARS = 32768; // as the gateway's MAX_MARKDOWN_CHARS
const KEPT = 200;
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
    const language = code.className.replace("language-", "");
    const head = el("div", { class: "code-head" }, language, button("Copy code", ({ target }) => copy(target, code)));
    const block = el("div", { class: "code" }, head);
    code.parentElement.replaceWith(block);
    block.append(el("pre", { tabindex: "0" }, code));
  }
  return [...body.childNodes];
}
