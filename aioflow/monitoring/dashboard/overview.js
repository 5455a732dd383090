// A job at a glance: its graph, its tasks as a table, and one of them opened.

import { h } from "./dom.js";
import { drawer, drawerWanted } from "./drawer.js";
import { chain, count, nothing, percent, rate, watermark } from "./format.js";
import { drawing } from "./graph.js";
import { panel, shareCell, state, table, timeLegend } from "./parts.js";

export const wanted = (route) => (route.rest[0] ? drawerWanted(route.jobId, route.rest[0]) : {});

export function view(store, route, job, page) {
  const chosen = job.byId.get(route.rest[0]) ? route.rest[0] : null;
  const hrefOf = (task) => `#/jobs/${job.id}/graph/${task.id === chosen ? "" : task.id}`;
  // The drawer takes its place beside the drawing.
  const room = page.width - 22 - (chosen && page.width > 1040 ? 454 : 0);
  return h("div", { class: `workspace ${chosen ? "open" : ""}` },
    h("div", { class: "stage" },
      panel("Graph", { end: timeLegend() }, h("div", { class: "drawing", tabindex: "0", role: "region", "aria-label": "Graph of the job" },
        drawing(job, { room, chosen, hrefOf }))),
      panel("Tasks", null, tasks(job, chosen, hrefOf))),
    chosen && drawer(store, route, job, job.byId.get(chosen)));
}

function tasks(job, chosen, hrefOf) {
  return table("Tasks", [
    { name: "Task", class: "name", cell: (task) => h("a", { href: hrefOf(task) }, chain(task.name)) },
    { name: "State", cell: (task) => state(task.status) },
    { name: "Subtasks", n: true, cell: (task) => count(task.parallelism) },
    { name: "Time spent", cell: shareCell },
    { name: "In", n: true, cell: (task) => (task.isSource ? nothing : rate(task.inRate)) },
    { name: "Out", n: true, cell: (task) => (task.isSink ? nothing : rate(task.outRate)) },
    { name: "Records in", n: true, cell: (task) => (task.isSource ? nothing : count(task.recordsIn)) },
    { name: "Records out", n: true, cell: (task) => (task.isSink ? nothing : count(task.recordsOut)) },
    { name: "Skew", n: true, cell: (task) => (task.skew === null ? nothing : percent(task.skew)) },
    { name: "Event time, UTC", n: true, cell: (task) => watermark(task.watermark) },
  ], job.tasks, { keyOf: (task) => task.id, chosen: (task) => task.id === chosen });
}
