// What is attached to a user's turn: pictures, and files of text. They are chosen, dropped or pasted, and checked before a
// file is read. They stay in this browser, and go nowhere but into the requests of the chat.

import { byId, button, bytes, el, svg } from "./dom.js";

// As the gateway's limits; the gateway also looks at the files.
const MIB = 1024 * 1024;
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_PICTURES = 16;
const MAX_BYTES = 4 * MIB;
const MAX_TOGETHER_BYTES = 7 * MIB;
const KEPT_CHARS = MIB; // of the pictures of one conversation, of the five million that a browser stores
const MAX_TEXT_BYTES = MIB / 4;
const MAX_TEXTS_BYTES = MIB / 2; // of one conversation; all of them are kept
const DRAGGED_MS = 600; // browsers tell more often than this that something is dragged over the page

// Those of the turn that is being written: pictures {name, url, kept}, without `url` if the picture was not kept, and
// files {name, text}.
let pending = [];
let reading = null;
let told = () => {};
let offered = new Promise((done) => { told = done; }); // whether the served model takes pictures
let dragged = 0;

/** The pictures of a turn, also of one that another program wrote. */
export const picturesOf = (turn) => (Array.isArray(turn.pictures) ? turn.pictures : []);

/** The files of text of a turn, likewise. */
const filesOf = (turn) => (Array.isArray(turn.files) ? turn.files.filter(isText) : []);

/** All that is attached to a turn. */
export const attachedTo = (turn) => [...picturesOf(turn), ...filesOf(turn)];

const isText = ({ text }) => typeof text === "string";

/** Whether a picture is here still. */
const isHere = ({ url }) => typeof url === "string" && url.startsWith("data:image/");

/** `before()` returns the turns that the model reads before the one that is being written. */
export function start(before) {
  byId("add-files").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", ({ target }) => {
    add([...target.files], before);
    target.value = "";
  });
  addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    // A table's cells come as text and as a picture of the text.
    if (!files.length || event.clipboardData.getData("text/plain")) return;
    event.preventDefault();
    add(files, before);
  });
  // Anywhere on the page: else the browser leaves the page for the file.
  for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = "copy";
    mark(kind === "dragover");
    if (kind === "drop") add([...event.dataTransfer.files], before);
  });
}

/** Shows that what is dragged may be dropped, for as long as the browser tells that something is dragged. */
function mark(shown) {
  byId("drop").hidden = !shown;
  clearTimeout(dragged);
  if (shown) dragged = setTimeout(() => mark(false), DRAGGED_MS);
}

/** Tells whether the served model takes pictures. */
export function offer(takes) {
  told(takes);
  offered = Promise.resolve(takes);
}

/** What is done once all files are read; null if none is being read. */
export const ready = () => reading;

function add(files, before) {
  location.hash = "chat";
  reading = (reading ?? Promise.resolve()).then(async () => {
    const wrong = [];
    for (const file of files) {
      const take = file.type.startsWith("image/") && file.type !== "image/svg+xml" ? takePicture : takeText;
      const problem = await take(file, [...before().flatMap(attachedTo), ...pending]);
      if (problem) wrong.push(problem);
    }
    byId("ask-problem").textContent = wrong.join(" ");
    byId("ask-problem").hidden = !wrong.length;
    draw();
    byId("text").focus();
  });
  const own = reading;
  own.finally(() => { if (reading === own) reading = null; });
}

/** Attaches a picture beside others; returns why not, or null. */
async function takePicture(file, others) {
  const { name, type, size } = file;
  const there = others.filter(isHere);
  const together = there.reduce((sum, { url }) => sum + (url.length - url.indexOf(",")) * 0.75, size);
  if (!await offered) return `${name}: the served model takes no pictures.`;
  if (!TYPES.includes(type)) return `${name}: only PNG, JPEG, WebP and GIF are pictures here.`;
  if (size > MAX_BYTES) return `${name} has ${bytes(size)}; a picture may have ${bytes(MAX_BYTES)}.`;
  if (there.length >= MAX_PICTURES) return `${name}: a conversation may have ${MAX_PICTURES} pictures.`;
  if (together > MAX_TOGETHER_BYTES) return `${name}: the pictures of a conversation may have ${bytes(MAX_TOGETHER_BYTES)} together.`;
  const url = await new Promise((done) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => done(null);
    reader.readAsDataURL(file);
  });
  if (!url) return `${name} cannot be read.`;
  pending.push({ name, url });
  return null;
}

/** Attaches a file of text beside others; returns why not, or null. */
async function takeText(file, others) {
  const { name, size } = file;
  const together = others.filter(isText).reduce((sum, { text }) => sum + lengthOf(text), size);
  if (size > MAX_TEXT_BYTES) return `${name} has ${bytes(size)}; a file of text may have ${bytes(MAX_TEXT_BYTES)}.`;
  if (together > MAX_TEXTS_BYTES) return `${name}: the files of a conversation may have ${bytes(MAX_TEXTS_BYTES)} together.`;
  const content = await file.arrayBuffer().catch(() => null);
  if (!content) return `${name} cannot be read.`;
  const text = decoded(new Uint8Array(content));
  if (text === null) return `${name} is no text: text, code, Markdown, CSV and the like go to the model, a PDF does not.`;
  pending.push({ name, text });
  return null;
}

/** The text of a file: UTF-8, UTF-16 with its mark, or Windows' Western European; null if the file is no text. */
function decoded(content) {
  const mark = (content[0] << 8) | content[1];
  const encoding = mark === 0xfffe ? "utf-16le" : mark === 0xfeff ? "utf-16be" : "utf-8";
  let text;
  try {
    text = new TextDecoder(encoding, { fatal: true }).decode(content);
  } catch {
    text = new TextDecoder("windows-1252").decode(content);
  }
  return /[\0-\x08\x0e-\x1a\x1c-\x1f]/.test(text) || text.startsWith("%PDF-") ? null : text.replaceAll("\r\n", "\n");
}

const lengthOf = (text) => new Blob([text]).size;

/** Puts what is attached to a turn into the composer, in place of what is there. */
export function put(attached) {
  pending = [...attached];
  draw();
}

/** Takes what is attached out of the composer, as fields of a turn behind others; marks pictures for which the browser has room. */
export function taken(turns) {
  let room = turns.flatMap(picturesOf).reduce((left, { url, kept }) => left - (kept && url ? url.length : 0), KEPT_CHARS);
  const files = pending.filter(isText);
  const pictures = pending.filter((each) => !isText(each)).map(({ name, url }) => {
    const kept = isHere({ url }) && url.length <= room;
    if (kept) room -= url.length;
    return { name, url, kept };
  });
  put([]);
  return { ...(pictures.length ? { pictures } : {}), ...(files.length ? { files } : {}) };
}

/** Whether the composer has nothing attached that can be sent. */
export const isEmpty = () => !pending.some((each) => isText(each) || isHere(each));

function draw() {
  byId("attached").replaceChildren(...pending.map((each) => el("li", {}, shown(each), button("×", () => {
    const at = pending.indexOf(each);
    put(pending.filter((other) => other !== each));
    (byId("attached").querySelectorAll("li > button")[Math.min(at, pending.length - 1)] ?? byId("text")).focus();
  }, { class: "remove", "aria-label": `Remove ${each.name}`, title: "Remove" }))));
  byId("attached").hidden = !pending.length;
}

function shown(each) {
  if (isText(each)) return file(each);
  return isHere(each) ? el("img", { src: each.url, alt: each.name })
    : el("span", { class: "lost" }, `${each.name} was not kept: the model does not see this picture.`);
}

const SHEET = "M6 3h8l5 5v13H6zM14 3v5h5M9 13h7M9 17h7";

/** A file of text: its name and size, and its text once that is asked for. */
function file({ name, text }) {
  const icon = svg("svg", { viewBox: "0 0 24 24", width: 20, height: 20, "aria-hidden": "true" },
    svg("path", { d: SHEET, fill: "none", stroke: "currentColor", "stroke-width": 1.7, "stroke-linejoin": "round" }));
  const box = el("details", { class: "file" },
    el("summary", { title: name }, icon, el("span", { class: "file-name" }, name), el("small", {}, bytes(lengthOf(text)))));
  box.addEventListener("toggle", () => {
    if (box.open && box.childElementCount === 1) box.append(el("pre", { tabindex: "0", "aria-label": `Text of ${name}` }, text));
  });
  return box;
}

/** What is attached to a turn, drawn; null if there is nothing. */
export function drawn(turn) {
  const found = attachedTo(turn);
  if (!found.length) return null;
  const fleeting = found.filter((each) => isHere(each) && !each.kept).map(({ name }) => name);
  return [
    el("ul", { class: "attached", "aria-label": "Attached" }, found.map((each) => el("li", {}, shown(each)))),
    fleeting.length ? el("p", { class: "note" }, `Too large to keep: ${fleeting.join(", ")}. Gone when you leave this conversation.`) : null,
  ];
}

/** A turn's content as a request has it: its text behind its files, or parts if there are pictures. */
export function content(turn) {
  const text = [...filesOf(turn).map(framed), turn.content].filter(Boolean).join("\n\n");
  const parts = picturesOf(turn).filter(isHere).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  if (!parts.length) return text;
  return text ? [...parts, { type: "text", text }] : parts;
}

/** A file's text between a line with its name and a fence that the text does not have. */
function framed({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map(({ length }) => length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** A conversation as the browser keeps it: with those pictures for which there is room, or with none. */
export function keepable(conversation, withPictures = true) {
  const turns = conversation.turns.map((turn) => turn.pictures === undefined ? turn : {
    ...turn,
    pictures: picturesOf(turn).map((picture) => withPictures && picture.kept ? picture : { name: picture.name }),
  });
  return { ...conversation, turns };
}

/** Whether a conversation, as it is kept, has a picture. */
export const hasPictures = ({ turns }) => turns.some((turn) => picturesOf(turn).some(isHere));
