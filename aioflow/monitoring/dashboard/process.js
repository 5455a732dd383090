// Which process the views of loops, flames and logs are about: the one that answers, or a worker.

import { h } from "./dom.js";
import { bytes, count, duration, nothing } from "./format.js";
import { panel, table } from "./parts.js";

const PATH = "aioflow/processes";

export const wantedProcesses = { [PATH]: 2000 };

let chosen = "";

/** The path, asked about the chosen process. */
export function about(path) {
  return chosen === "" ? path : `${path}${path.includes("?") ? "&" : "?"}taskmanager=${encodeURIComponent(chosen)}`;
}

function known(store) {
  const found = store.value(PATH)?.processes ?? [];
  if (chosen !== "" && store.value(PATH) && !found.some((one) => one.id === chosen)) chosen = "";
  return found;
}

const named = (one) => (one.id === "" ? "jobmanager" : one["is-here"] && one.id === "local" ? "this process" : one.id.length > 20 ? one.id.slice(0, 8) : one.id);
const keyOf = (one) => (one["is-here"] ? "" : one.id);

/** Chooses one. Nothing where there is only one. */
export function chooser(store, page) {
  const found = known(store);
  if (found.length < 2) return null;
  return h("label", null, "Process ", h("select", {
    onchange: (event) => {
      chosen = event.target.value;
      page.redraw();
    },
  }, found.map((one) => h("option", { key: keyOf(one), value: keyOf(one), selected: keyOf(one) === chosen }, named(one)))));
}

/** All of them at a glance; a click looks into one. Nothing where there is only one. */
export function processes(store, page) {
  const found = known(store);
  if (found.length < 2) return null;
  const late = (ms) => (ms === null ? nothing : h("span", { class: ms >= 100 ? "text-busy" : null }, duration(ms)));
  return panel("Processes", null, table("Processes", [
    {
      name: "Process", class: "name", cell: (one) => h("button", {
        class: "link", "aria-pressed": keyOf(one) === chosen ? "true" : "false", onclick: () => {
          chosen = keyOf(one);
          page.redraw();
        },
      }, named(one)),
    },
    { name: "Runs", n: true, cell: (one) => `${count(one.tasks)} ${one.tasks === 1 ? "task" : "tasks"}` },
    { name: "Loop late now", n: true, cell: (one) => late(one["lag-ms"]) },
    { name: "At most", n: true, cell: (one) => late(one["lag-max-ms"]) },
    { name: "Processor time", n: true, cell: (one) => (one["cpu-s"] === null ? nothing : duration(one["cpu-s"] * 1000)) },
    { name: "Memory, most", n: true, cell: (one) => (one.memory === null ? nothing : bytes(one.memory)) },
    {
      name: "Network memory", n: true,
      cell: (one) => (one["network-total"] === null ? nothing : `${bytes(one["network-used"])} of ${bytes(one["network-total"])}`),
    },
    { name: "Last heard", n: true, cell: (one) => (one["is-here"] ? "answers" : `${duration(one["silence-ms"])} ago`) },
  ], found, { keyOf: (one) => `process ${keyOf(one)}`, chosen: (one) => keyOf(one) === chosen }));
}
