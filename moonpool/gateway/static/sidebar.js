// The list of conversations: search, names, files, and a deletion that can be undone.

import { bring, everything, remove, save, saved, title } from "./conversations.js";
import { button, byId, el, toast } from "./dom.js";

let shown = null; // the conversation that the chat shows
let open = () => {};

/** `opened(conversation)` is called when one is chosen, with null for a new one. */
export function start(opened) {
  open = opened;
  byId("new").addEventListener("click", () => choose(null));
  byId("search").addEventListener("input", () => list(shown));
  byId("export").addEventListener("click", download);
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", upload);
  byId("side-open").addEventListener("click", () => document.body.classList.toggle("side-shown"));
  byId("side-close").addEventListener("click", () => document.body.classList.remove("side-shown"));
}

function choose(conversation) {
  document.body.classList.remove("side-shown");
  location.hash = "chat";
  open(conversation);
}

/** Draws the list; `conversation` is the one that the chat shows. */
export function list(conversation) {
  shown = conversation;
  const sought = byId("search").value.trim().toLowerCase();
  const text = (each) => [title(each), ...each.turns.map(({ content }) => content)].join("\n").toLowerCase();
  const found = saved().filter((each) => !sought || text(each).includes(sought));
  byId("conversations").replaceChildren(...found.map(entry));
  byId("none").hidden = !sought || found.length > 0;
}

function entry(conversation) {
  const name = title(conversation);
  const go = button(name, () => choose(conversation), { class: "quiet name", title: name });
  if (conversation.id === shown?.id) go.setAttribute("aria-current", "true");
  const more = [
    button("✎", () => rename(item, conversation), { class: "quiet", "aria-label": `Rename ${name}` }),
    button("×", () => drop(conversation), { class: "quiet", "aria-label": `Delete ${name}` }),
  ];
  const item = el("li", {}, go, more);
  return item;
}

function rename(item, conversation) {
  const input = el("input", { "aria-label": "Name of the conversation", value: title(conversation) });
  let ended = false;
  const end = (kept) => {
    if (ended) return;
    ended = true;
    if (kept && input.value.trim()) {
      const own = conversation.id === shown?.id ? shown : conversation;
      own.title = input.value.trim();
      save(own);
    }
    list(shown);
  };
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") end(false);
  });
  input.addEventListener("blur", () => end(true));
  item.replaceChildren(input);
  input.select();
}

function drop(conversation) {
  remove(conversation.id);
  if (conversation.id === shown?.id) open(null);
  else list(shown);
  toast(`Deleted “${title(conversation)}”.`, "Undo", () => {
    save(conversation);
    list(shown);
  });
}

function download() {
  const url = URL.createObjectURL(new Blob([everything()], { type: "application/json" }));
  const link = el("a", { href: url, download: "moonpool-conversations.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url));
}

async function upload({ target }) {
  const [file] = target.files;
  target.value = "";
  if (!file) return;
  try {
    toast(`${bring(await file.text())} conversations are here now.`);
  } catch {
    toast("This file has no conversations of this page.");
  }
  list(shown);
}
