// Pictures of a user's turn: chosen, dropped or pasted, and checked before a file is read. They stay in this browser, and
// go nowhere but into the requests of the chat.

import { byId, button, bytes, el } from "./dom.js";

// As the gateway's limits; the gateway also looks at the files.
const MIB = 1024 * 1024;
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_PICTURES = 16;
const MAX_BYTES = 4 * MIB;
const MAX_TOGETHER_BYTES = 7 * MIB;
const KEPT_CHARS = MIB; // of the pictures of one conversation, of the five million that a browser stores

let pending = []; // {name, url, kept}, those of the turn that is being written; without `url`: was not kept
let reading = null;
let offered = false;

/** The pictures of a turn, also of one that another program wrote. */
export const picturesOf = (turn) => (Array.isArray(turn.pictures) ? turn.pictures : []);

/** Whether a picture is here still. */
const isHere = ({ url }) => typeof url === "string" && url.startsWith("data:image/");

/** `before()` returns the turns that the model reads before the one that is being written. */
export function start(before) {
  byId("add-pictures").addEventListener("click", () => byId("picture-files").click());
  byId("picture-files").addEventListener("change", ({ target }) => {
    add([...target.files], before);
    target.value = "";
  });
  byId("text").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    add(files, before);
  });
  for (const kind of ["dragover", "drop"]) byId("chat").addEventListener(kind, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // else the browser leaves the page for the file
    if (kind === "drop") add([...event.dataTransfer.files], before);
  });
}

/** Offers pictures, if the served model takes them. */
export function offer(takes) {
  offered = takes;
  byId("add-pictures").hidden = !takes;
}

/** What is done once all files are read; null if none is being read. */
export const ready = () => reading;

function add(files, before) {
  reading = (reading ?? Promise.resolve()).then(async () => {
    const wrong = [];
    for (const file of files) {
      const problem = refusal(file, before()) ?? await take(file);
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

/** Why a file is not taken; null if it may be read. */
function refusal({ name, type, size }, before) {
  const there = [...before.flatMap(picturesOf), ...pending].filter(isHere);
  const together = there.reduce((sum, { url }) => sum + (url.length - url.indexOf(",")) * 0.75, size);
  if (!offered) return "The served model takes no pictures.";
  if (!TYPES.includes(type)) return `${name}: only PNG, JPEG, WebP and GIF are pictures here.`;
  if (size > MAX_BYTES) return `${name} has ${bytes(size)}; a picture may have ${bytes(MAX_BYTES)}.`;
  if (there.length >= MAX_PICTURES) return `${name}: a conversation may have ${MAX_PICTURES} pictures.`;
  if (together > MAX_TOGETHER_BYTES) return `${name}: the pictures of a conversation may have ${bytes(MAX_TOGETHER_BYTES)} together.`;
  return null;
}

async function take(file) {
  const url = await new Promise((done) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => done(null);
    reader.readAsDataURL(file);
  });
  if (!url) return `${file.name} cannot be read.`;
  pending.push({ name: file.name, url });
  return null;
}

/** Puts the pictures of a turn into the composer, in place of those that are there. */
export function put(pictures) {
  pending = [...pictures];
  draw();
}

/** Takes the pictures out of the composer for a turn behind others, and marks those for which the browser has room. */
export function taken(turns) {
  let room = turns.flatMap(picturesOf).reduce((left, { url, kept }) => left - (kept && url ? url.length : 0), KEPT_CHARS);
  const found = pending.map(({ name, url }) => {
    const kept = isHere({ url }) && url.length <= room;
    if (kept) room -= url.length;
    return { name, url, kept };
  });
  put([]);
  return found;
}

/** Whether the composer has no picture that can be sent. */
export const isEmpty = () => !pending.some(isHere);

function draw() {
  byId("pictures").replaceChildren(...pending.map((picture) => el("li", {}, shown(picture), button("×", () => {
    const at = pending.indexOf(picture);
    put(pending.filter((other) => other !== picture));
    (byId("pictures").querySelectorAll("button")[Math.min(at, pending.length - 1)] ?? byId("text")).focus();
  }, { "aria-label": `Remove ${picture.name}` }))));
  byId("pictures").hidden = !pending.length;
}

const shown = (picture) => isHere(picture)
  ? el("img", { src: picture.url, alt: picture.name })
  : el("span", { class: "lost" }, `${picture.name} was not kept: the model does not see this picture.`);

/** The pictures of a turn, drawn; null if there are none. */
export function drawn(turn) {
  const found = picturesOf(turn);
  if (!found.length) return null;
  const fleeting = found.filter((picture) => isHere(picture) && !picture.kept).map(({ name }) => name);
  return [
    el("ul", { class: "pictures", "aria-label": "Pictures" }, found.map((picture) => el("li", {}, shown(picture)))),
    fleeting.length ? el("p", { class: "note" }, `Too large to keep: ${fleeting.join(", ")}. Gone when you leave this conversation.`) : null,
  ];
}

/** A turn's content as a request has it: its text, or parts if there are pictures. */
export function content(turn) {
  const parts = picturesOf(turn).filter(isHere).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  if (!parts.length) return turn.content;
  return turn.content ? [...parts, { type: "text", text: turn.content }] : parts;
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
