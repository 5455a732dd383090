// The first page: which jobs there are, and how they fare.

import { h } from "./dom.js";
import { count, duration, moment } from "./format.js";
import { figures, missing, panel, state, table } from "./parts.js";

export const title = () => "Jobs";

export const wanted = () => ({ "jobs/overview": 1000, overview: 2000, taskmanagers: 5000 });

export function view(store) {
  const jobs = store.value("jobs/overview")?.jobs;
  const overview = store.value("overview");
  if (!jobs) return missing(store, "jobs/overview", "jobs");
  const over = (job) => job["end-time"] > 0;
  const newestFirst = (list) => [...list].sort((a, b) => b["start-time"] - a["start-time"]);
  const running = newestFirst(jobs.filter((job) => !over(job)));
  const ended = newestFirst(jobs.filter(over));
  return [
    h("div", { class: "headline" }, h("h1", null, "Jobs")),
    overview && figures([
      ["Running", count(overview["jobs-running"])],
      ["Finished", count(overview["jobs-finished"])],
      ["Cancelled", count(overview["jobs-cancelled"])],
      ["Failed", h("span", { class: overview["jobs-failed"] ? "text-bad" : null }, count(overview["jobs-failed"]))],
      ["Workers", count(overview.taskmanagers)],
      ["Slots in use", `${count(overview["slots-total"] - overview["slots-available"])} of ${count(overview["slots-total"])}`],
    ]),
    panel("Under way", null, list(running, "Jobs under way", "No job is under way.")),
    ended.length > 0 && panel("Over", null, list(ended, "Jobs that are over", "")),
    workers(store.value("taskmanagers")?.taskmanagers),
  ];
}

function list(jobs, label, empty) {
  return table(label, [
    { name: "Job", class: "name", cell: (job) => h("a", { href: `#/jobs/${job.jid}` }, job.name) },
    { name: "State", cell: (job) => state(job.state) },
    { name: "Tasks", cell: (job) => tasks(job.tasks) },
    { name: "Since", n: true, cell: (job) => moment(job["start-time"]) },
    { name: "For", n: true, cell: (job) => duration(job.duration) },
    { name: "Id", cell: (job) => h("span", { class: "mono quiet", title: job.jid }, job.jid.slice(0, 8)) },
  ], jobs, { keyOf: (job) => job.jid, empty });
}

function tasks(counts) {
  const parts = Object.entries(counts ?? {}).filter(([name, n]) => name !== "total" && n > 0).map(([name, n]) => (name === "scheduled" ? `${n} waiting for slots` : `${n} ${name}`));
  return parts.join(", ") || "none";
}

function workers(list) {
  if (!list?.length) return null;
  return panel("Workers", { note: list.length === 1 ? null : count(list.length) }, table("Workers", [
    { name: "Worker", class: "name", cell: (one) => h("span", { class: "mono" }, one.id) },
    { name: "Slots", n: true, cell: (one) => count(one.slotsNumber) },
    { name: "Free", n: true, cell: (one) => count(one.freeSlots) },
    { name: "Last heartbeat", n: true, cell: (one) => (one.timeSinceLastHeartbeat > 0 ? moment(one.timeSinceLastHeartbeat) : "–") },
    { name: "Processors", n: true, cell: (one) => count(one.hardware?.cpuCores) },
  ], list, { keyOf: (one) => one.id }));
}
