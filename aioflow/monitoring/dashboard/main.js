// The frame: reads the address, asks for what the view needs, and draws it again when something has come.

import * as checkpoints from "./checkpoints.js";
import * as exceptions from "./exceptions.js";
import * as flame from "./flame.js";
import * as jobs from "./jobs.js";
import * as logs from "./logs.js";
import * as metrics from "./metrics.js";
import * as overview from "./overview.js";
import * as runtime from "./runtime.js";
import * as stateView from "./state.js";
import * as tap from "./tap.js";
import * as watermarks from "./watermarks.js";
import { h, render, s } from "./dom.js";
import { duration } from "./format.js";
import { basics, headline } from "./job.js";
import { Live } from "./live.js";
import { jobOf } from "./model.js";
import { missing } from "./parts.js";
import { Store } from "./store.js";
import { unlock } from "./unlock.js";

const JOB_VIEWS = { graph: overview, watermarks, checkpoints, exceptions, metrics, state: stateView, tap, flame };
const PAGES = { "": jobs, runtime, logs, flame: flame.loop };
const LINKS = [["", "Jobs"], ["runtime", "Event loop"], ["logs", "Log"]];
const SILENT_MS = 3000;

const store = new Store(() => soon());
const live = new Live(store, () => soon());
let route = read();
let waiting = false;

/** #/jobs/ID/VIEW/REST... or #/PAGE */
function read() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map(decoded);
  const params = new URLSearchParams(query);
  if (parts[0] === "jobs" && /^[0-9a-f]{32}$/.test(parts[1] ?? "")) {
    const name = Object.hasOwn(JOB_VIEWS, parts[2] ?? "") ? parts[2] : "graph";
    return { view: JOB_VIEWS[name], name, jobId: parts[1], rest: parts.slice(3), params };
  }
  const name = Object.hasOwn(PAGES, parts[0]) ? parts[0] : "";
  return { view: PAGES[name], name, jobId: null, rest: parts.slice(1), params };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function soon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    draw();
  });
}

function draw() {
  const job = route.jobId && store.value(`jobs/${route.jobId}`);
  live.follow(job ? route.jobId : null);
  const model = job ? jobOf(live.newest(job), live.values()) : null;
  store.need({
    ...(route.jobId ? basics(route.jobId) : { config: 60_000 }), ...route.view.wanted(route, model), ...live.wanted(model),
    ...(route.view.more?.(store, route, model) ?? {}),
  });
  const main = document.getElementById("main");
  const page = { width: main.clientWidth - 40, redraw: soon };
  render(document.getElementById("top"), top());
  const title = model ? `${model.name} · aioflow` : "aioflow";
  if (document.title !== title) document.title = title;
  // Each view begins with a document of its own, so that nothing of one stands in another.
  const key = `${route.jobId ?? ""}/${route.name}`;
  const found = store.locked ? unlock(store) : route.jobId === null ? route.view.view(store, route, page)
    : model ? [headline(model, store, route.name), ...[route.view.view(store, route, model, page)].flat()]
      : missing(store, `jobs/${route.jobId}`, "job");
  render(main, h("div", { class: "view", key, "data-view": route.name || "jobs" }, found));
}

function top() {
  const lost = store.silent !== null && Date.now() - store.silent > SILENT_MS;
  return h("div", { class: "bar" },
    h("a", { class: "brand", href: "#/" }, logo(), "aioflow"),
    h("nav", { "aria-label": "Pages" }, LINKS.map(([name, label]) =>
      h("a", { href: `#/${name}`, "aria-current": here(name) ? "page" : null }, label))),
    h("span", { class: `live ${lost ? "lost" : ""}` }, lost ? `silent for ${duration(Date.now() - store.silent)}` : "live"),
    h("button", { class: "plain theme", onclick: turn, title: "Colours", "aria-label": `Colours: ${theme()}. Change` }, "◐", h("span", { class: "roomy" }, ` ${theme()}`)));
}

function here(name) {
  return name === "" ? route.name === "" || route.jobId !== null : route.name === name && route.jobId === null;
}

function logo() {
  return s("svg", { width: 20, height: 20, viewBox: "0 0 32 32", "aria-hidden": "true" },
    s("rect", { class: "logo-ground", width: 32, height: 32, rx: 7 }),
    s("path", {
      class: "logo-line", d: "M5 11c6-5 10 5 16 0 2-1.7 4-1.7 6-.5M5 21c6-5 10 5 16 0 2-1.7 4-1.7 6-.5", fill: "none", "stroke-width": 3, "stroke-linecap": "round",
    }));
}

// Colours: as the system has them, or one of the two.

function theme() {
  return document.documentElement.dataset.theme ?? "system";
}

function turn() {
  const next = { system: "light", light: "dark", dark: "system" }[theme()];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    if (next === "system") localStorage.removeItem("aioflow-theme");
    else localStorage.setItem("aioflow-theme", next);
  } catch {
    // Storage is forbidden here: it holds as long as the page does.
  }
  soon();
}

addEventListener("hashchange", () => {
  const before = route;
  route = read();
  const same = before.jobId === route.jobId && before.name === route.name;
  if (!same) {
    before.view.leave?.();
    scrollTo(0, 0);
    document.getElementById("main").focus({ preventScroll: true });
  }
  draw();
});
addEventListener("resize", soon);
setInterval(soon, 1000); // Ages grow although nothing arrives.
draw();
