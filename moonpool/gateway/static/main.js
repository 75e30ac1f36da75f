// The page: which view is shown, the model or adapter that is asked, and the key.

import { get, key, setKey } from "./api.js";
import * as attached from "./attached.js";
import * as chat from "./chat.js";
import * as cluster from "./cluster.js";
import { byId, el } from "./dom.js";
import * as requests from "./requests.js";
import * as see from "./see.js";

const VIEWS = ["chat", "see", "cluster", "requests"];

function route() {
  const [wanted, ...rest] = location.hash.slice(1).split("/");
  const view = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  for (const name of VIEWS) byId(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  cluster.hide();
  if (view === "cluster") cluster.show();
  if (view === "requests") requests.show(decodeURIComponent(rest.join("/")));
}

/** Fills the list of the model and its adapters; the first is the model. */
async function models() {
  try {
    const { data } = await get("/v1/models");
    const before = byId("model").value;
    byId("model").replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
    if (data.some(({ id }) => id === before)) byId("model").value = before;
    attached.offer(data[0].architecture?.input_modalities?.includes("image") ?? false);
    document.title = `${data[0].id} · Moonpool`;
    byId("model-problem").hidden = true;
    byId("access").hidden = !key();
  } catch (error) {
    attached.offer(false);
    byId("model-problem").textContent = error.message;
    byId("model-problem").hidden = false;
    byId("access").hidden = error.status !== 401 && !key();
    byId("access").open = error.status === 401;
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  byId("access").open = false;
  models();
  route();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("views").focus();
});
addEventListener("hashchange", route);
chat.start();
requests.start();
see.start();
models();
route();
