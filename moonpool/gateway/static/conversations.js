// Conversations of this browser, in its local storage; they go nowhere but into the requests of the playground.

const LIST = "moonpool-conversations";
const SHOWN = "moonpool-conversation"; // per tab
const KEPT = 50;

/** All conversations, the one that changed last first. */
export function saved() {
  try {
    return JSON.parse(localStorage.getItem(LIST) ?? "[]").filter(({ id, turns }) => id && Array.isArray(turns));
  } catch {
    return []; // storage that is blocked, or that another program wrote
  }
}

/** Keeps a conversation; the oldest ones make room. */
export function save(conversation) {
  write([conversation, ...saved().filter(({ id }) => id !== conversation.id)].slice(0, KEPT));
}

export function remove(id) {
  write(saved().filter((each) => each.id !== id));
}

function write(conversations) {
  for (let kept = conversations; ; kept = kept.slice(0, -1)) {
    try {
      return localStorage.setItem(LIST, JSON.stringify(kept));
    } catch {
      if (!kept.length) return undefined;
    }
  }
}

/** The conversation that this tab showed before it was loaded again. */
export const shownBefore = () => saved().find(({ id }) => id === sessionStorage.getItem(SHOWN));

export const remember = (id) => sessionStorage.setItem(SHOWN, id);
