// A live tap: a few of the records on an edge, as they go by.

import { h } from "./dom.js";
import { withToken } from "./control.js";
import { chain, count, moment, nothing, rate, watermark } from "./format.js";
import { panel, table } from "./parts.js";
import { events } from "./stream.js";

const KEPT = 40;

export const wanted = () => ({});

let tap = null;

/** One tap at a time: another edge, or another view, ends it. */
export function leave() {
  tap?.abort.abort();
  tap = null;
}

export function view(store, route, job, page) {
  const edges = [...new Map(job.edges.map((edge) => [`${edge.source}-${edge.target}`, edge])).entries()];
  const wantedEdge = route.rest[0] && edges.some(([id]) => id === route.rest[0]) ? route.rest[0] : edges[0]?.[0];
  if (tap && (tap.jobId !== job.id || tap.edge !== wantedEdge)) leave();
  if (!edges.length) return panel("Tap", null, h("p", { class: "empty" }, "This job is one chain: no record travels between tasks."));
  const name = ([, edge]) => `${chain(job.byId.get(edge.source).name)} → ${chain(job.byId.get(edge.target).name)}`;
  const start = () => {
    tap = { jobId: job.id, edge: wantedEdge, abort: new AbortController(), records: [], seen: 0, since: Date.now(), error: null, number: 0 };
    listen(tap, start, page);
    page.redraw();
  };
  return [
    h("div", { class: "choices" },
      h("label", null, "Edge ", h("select", { onchange: (event) => { location.hash = `#/jobs/${job.id}/tap/${event.target.value}`; } },
        edges.map((entry) => h("option", { key: entry[0], value: entry[0], selected: entry[0] === wantedEdge }, name(entry))))),
      tap && !tap.error ? h("button", { onclick: () => { leave(); page.redraw(); } }, "Stop") : h("button", { class: "main", onclick: start, disabled: job.over }, "Look at records")),
    tap?.error && h("p", { class: "text-bad" }, tap.error.message),
    panel("Records", { note: tap && !tap.error ? `${count(tap.seen)} seen, ${rate(tap.seen / Math.max(1, (Date.now() - tap.since) / 1000))}; shown is a sample` : null },
      table("Records", [
        { name: "Seen at", n: true, cell: (one) => moment(one.at) },
        { name: "Event time", n: true, cell: (one) => (one.timestamp === null ? nothing : watermark(one.timestamp)) },
        { name: "Record", class: "mono wide", cell: (one) => one.value },
      ], tap?.records ?? [], { keyOf: (one) => one.number, empty: tap && !tap.error ? "Waiting for the next record …" : "Records are sampled only while you look at them." })),
  ];
}

async function listen(mine, again, page) {
  try {
    for await (const { name, body } of events(`aioflow/jobs/${mine.jobId}/tap?edge=${encodeURIComponent(mine.edge)}`, mine.abort.signal)) {
      if (name !== "records") continue;
      mine.seen += body.seen;
      const fresh = body.records.map((one) => ({ ...one, at: body.now, number: ++mine.number })).reverse();
      mine.records = [...fresh, ...mine.records].slice(0, KEPT);
      page.redraw();
    }
    mine.error = new Error("The job is over.");
  } catch (error) {
    if (mine.abort.signal.aborted) return;
    mine.error = error;
    if (error.status === 401 || error.status === 403) withToken("Records are shown to who knows the token", "Show", again);
  }
  page.redraw();
}
