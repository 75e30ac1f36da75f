// Conversations of this browser, each under its own key of the local storage, so that two tabs do not write over each
// other. They go nowhere but into the requests of the chat.

import { attachedTo, hasPictures, keepable } from "./attached.js";

const PREFIX = "moonpool-conversation:";
const OLD_LIST = "moonpool-conversations"; // where earlier versions kept all of them
const SHOWN = "moonpool-conversation"; // per tab
const KEPT = 500;

const isOne = (value) => Boolean(value?.id) && Array.isArray(value.turns);

function parsed(text) {
  try {
    const value = JSON.parse(text);
    return isOne(value) ? value : null;
  } catch {
    return null; // another program wrote it
  }
}

/** All conversations, the one that changed last first. */
export function saved() {
  try {
    adopt();
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    const found = keys.map((key) => parsed(localStorage.getItem(key))).filter((value) => value !== null);
    return found.sort((one, other) => (other.changed ?? 0) - (one.changed ?? 0));
  } catch {
    return []; // storage that is blocked
  }
}

/** Takes over the list of an earlier version, once. */
function adopt() {
  const list = localStorage.getItem(OLD_LIST);
  if (list === null) return;
  localStorage.removeItem(OLD_LIST);
  try {
    JSON.parse(list).filter(isOne).reverse().forEach((each, at) => save({ ...each, changed: at + 1, revision: 0 }));
  } catch {
    // nothing that can be read
  }
}

export const find = (id) => parsed(read(PREFIX + id));

function read(key) {
  try {
    return localStorage.getItem(key) ?? "";
  } catch {
    return "";
  }
}

/**
 * Keeps a conversation; the oldest ones make room, their pictures first. If another tab has gone on with it meanwhile, both
 * are kept: this one under a new id. Returns whether there was room for the pictures that are to be kept.
 */
export function save(conversation) {
  const there = find(conversation.id);
  if (there && there.revision !== conversation.revision && !begins(conversation.turns, there.turns)) {
    conversation.id = newId();
    conversation.title = `${title(conversation)} (other tab)`;
  }
  conversation.changed = Date.now();
  conversation.revision = newId();
  return write(conversation);
}

/** Whether the turns begin with others. */
const begins = (turns, others) => others.length <= turns.length &&
  others.every((other, at) => other.role === turns[at].role && other.content === turns[at].content);

function write(conversation) {
  let kept = keepable(conversation);
  const others = saved().filter(({ id }) => id !== conversation.id);
  for (const old of others.slice(KEPT - 1)) remove(old.id);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(kept));
      return hasPictures(kept) || !hasPictures(keepable(conversation));
    } catch {
      const pictured = others.findLast(hasPictures);
      if (pictured) {
        others[others.indexOf(pictured)] = keepable(pictured, false);
        localStorage.setItem(PREFIX + pictured.id, JSON.stringify(keepable(pictured, false)));
      } else if (hasPictures(kept)) kept = keepable(conversation, false);
      else if (others.length) remove(others.pop().id);
      else return false;
    }
  }
}

export function remove(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // nothing is kept
  }
}

/** Calls `changed(id, conversation)` when another tab has kept a conversation, or removed it (null). */
export function watch(changed) {
  addEventListener("storage", ({ key, newValue }) => {
    if (key?.startsWith(PREFIX)) changed(key.slice(PREFIX.length), newValue === null ? null : parsed(newValue));
  });
}

/** Puts conversations of a file beside those that are here; returns how many. */
export function bring(text) {
  const found = JSON.parse(text).conversations.filter(isOne);
  for (const each of found) write({ ...each, id: find(each.id) ? newId() : each.id, changed: each.changed ?? Date.now() });
  return found.length;
}

export const everything = () => JSON.stringify({ conversations: saved() }, null, 1);

const TITLE_CHARS = 60;

export const title = ({ title: given, turns }) => given || turns[0]?.content.slice(0, TITLE_CHARS) ||
  (turns.length && attachedTo(turns[0])[0]?.name) || "New conversation";

// randomUUID needs HTTPS.
export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;

/** The conversation that this tab showed before it was loaded again. */
export const shownBefore = () => find(sessionStorage.getItem(SHOWN));

export const remember = (id) => sessionStorage.setItem(SHOWN, id);
