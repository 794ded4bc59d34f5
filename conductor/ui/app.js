/* The page: which view is shown, what it asks the server and when, the key, the colours. A view has
 * load(state), which asks the server, and render(state), which gives the nodes to show. */
import { get, key, setKey } from "./api.js";
import { h, morph } from "./dom.js";
import * as cluster from "./cluster.js";
import * as requests from "./requests.js";
import * as goodput from "./goodput.js";
import * as chat from "./chat.js";

const views = { cluster, requests, goodput, chat };
const names = Object.keys(views);
const $ = (id) => document.getElementById(id);

/* What all views share. */
const state = {
  view: "cluster",
  detail: "", /* the rest of the address: a request's id */
  status: null,
  refresh: () => draw(),
};

function draw() {
  morph($("view"), views[state.view].render(state));
}

function problem(error) {
  const p = $("problem");
  p.hidden = !error;
  if (!error) return;
  const asks = error.status === 401 || error.status === 403;
  morph(p, [h("span", {}, asks ? "This server asks for an API key with the scope admin. " : "", error.message),
    asks && h("button", { type: "button", "data-action": "key" }, "Enter a key")]);
}

function showWhere() {
  const st = state.status;
  morph($("where"), st ? [
    h("span", { class: `dot ${st.serving ? "good" : "bad"}`, title: st.serving ? "serving" : st.reason }),
    h("b", {}, st.model_id),
    h("span", { class: "dim" }, ` ${st.cluster} · ${st.version}${st.serving ? "" : ` · ${st.reason}`}`),
  ] : []);
}

/* ---- asking ---- */

let round = 0;

/* Asks now and then every second, while the page is visible. Only the newest call goes on. */
async function ask() {
  const mine = ++round;
  while (mine === round) {
    if (!document.hidden) {
      try {
        const wait = views[state.view].load(state);
        state.status = await get("/admin/v1/status");
        await wait;
        if (mine !== round) return;
        problem(null);
        showWhere();
        draw();
      } catch (e) {
        if (mine !== round) return;
        problem(e);
      }
    }
    await new Promise((done) => setTimeout(done, 1000));
  }
}

/* ---- moving ---- */

function go() {
  const [view, ...rest] = location.hash.slice(1).split("/");
  state.view = views[view] ? view : "cluster";
  try {
    state.detail = decodeURIComponent(rest.join("/"));
  } catch {
    state.detail = "";
  }
  for (const name of names) {
    $(`tab-${name}`).setAttribute("aria-selected", name === state.view);
    $(`tab-${name}`).tabIndex = name === state.view ? 0 : -1;
  }
  $("view").className = state.view;
  $("view").setAttribute("aria-labelledby", `tab-${state.view}`);
  document.title = `Baton: ${state.view}`;
  draw();
  ask();
}

document.querySelector("nav").addEventListener("keydown", (e) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
  if (!step) return;
  const next = names[(names.indexOf(state.view) + step + names.length) % names.length];
  location.hash = next;
  $(`tab-${next}`).focus();
  e.preventDefault();
});

/* Elements name what they do in data-action; a view has it in its actions. */
for (const type of ["click", "input", "submit", "keydown"]) {
  document.addEventListener(type, (e) => {
    const from = e.target instanceof Element ? e.target.closest("[data-action]") : null;
    const name = from?.getAttribute("data-action");
    if (name === "key" && type === "click") openKey();
    else if (name) views[state.view].actions?.[name]?.(state, e, from);
  });
}

/* Escape closes what a view shows beside its list. */
document.addEventListener("keydown", (e) => {
  if (e.key === "Escape" && state.detail && !$("key-dialog").open) location.hash = state.view;
});

/* ---- key and colours ---- */

function openKey() {
  $("key-input").value = key();
  $("key-dialog").showModal();
}

$("key-button").addEventListener("click", openKey);
$("key-dialog").addEventListener("close", (e) => {
  const what = e.target.returnValue;
  if (what === "use" || what === "forget") setKey(what === "use" ? $("key-input").value.trim() : "");
  $("key-input").value = "";
  ask();
});

const themes = ["", "light", "dark"];
function paint(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  $("theme").textContent = name ? name[0].toUpperCase() + name.slice(1) : "Auto";
}
$("theme").addEventListener("click", () => {
  const next = themes[(themes.indexOf(localStorage.getItem("baton-theme") ?? "") + 1) % themes.length];
  localStorage.setItem("baton-theme", next);
  paint(next);
});
paint(localStorage.getItem("baton-theme") ?? "");

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) ask();
});
addEventListener("hashchange", go);
go();
