// The page: which view is shown, the model's name, and the key.

import { get, key, setKey } from "./api.js";
import * as chat from "./chat.js";
import * as cluster from "./cluster.js";
import { byId } from "./dom.js";
import * as requests from "./requests.js";

const VIEWS = ["chat", "cluster", "requests"];

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

async function model() {
  try {
    const { data } = await get("/v1/models");
    byId("model").textContent = data[0].id;
    byId("access").hidden = !key();
  } catch (error) {
    byId("model").textContent = error.message;
    byId("access").hidden = error.status !== 401 && !key();
    byId("access").open = error.status === 401;
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  byId("access").open = false;
  model();
  route();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("views").focus();
});
addEventListener("hashchange", route);
chat.start();
requests.start();
model();
route();
