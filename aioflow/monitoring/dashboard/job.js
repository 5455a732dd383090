// What stands above each view of a job: its name and state, the figures that matter, and the way to its other views.

import { h } from "./dom.js";
import { ask, askParallelism, mayChange } from "./control.js";
import { bytes, count, duration, isInstant, moment, nothing, rate } from "./format.js";
import { figures, state } from "./parts.js";

export const TABS = [
  ["graph", "Graph"], ["watermarks", "Event time"], ["checkpoints", "Checkpoints"], ["exceptions", "Exceptions"], ["metrics", "Metrics"],
  ["state", "State"], ["tap", "Tap"],
];

export const basics = (id) => ({
  [`jobs/${id}`]: 2000,
  [`jobs/${id}/checkpoints`]: 2000,
  [`jobs/${id}/exceptions?maxExceptions=20`]: 3000,
  config: 60_000,
});

export function headline(job, store, shown) {
  const checkpoints = store.value(`jobs/${job.id}/checkpoints`);
  const failures = store.value(`jobs/${job.id}/exceptions?maxExceptions=20`)?.exceptionHistory?.entries ?? [];
  const changes = mayChange(store) && !job.over;
  return [
    h("div", { class: "headline" },
      h("h1", null, job.name), state(job.state), h("span", { class: "mono quiet", title: job.id }, job.id.slice(0, 8)),
      changes && h("div", { class: "end" },
        h("button", { onclick: () => ask(`Write a savepoint of ${job.name}?`, "POST", `jobs/${job.id}/savepoints`, {}) }, "Savepoint"),
        h("button", { onclick: () => askParallelism(job) }, "Rescale"),
        h("button", { onclick: () => ask(`Stop ${job.name} with a savepoint?`, "POST", `jobs/${job.id}/stop`, { drain: false }) }, "Stop"),
        h("button", { onclick: () => ask(`Cancel ${job.name} at once?`, "PATCH", `jobs/${job.id}?mode=cancel`) }, "Cancel"))),
    summary(job, checkpoints, failures),
    h("nav", { class: "tabs", "aria-label": "Views of this job" }, TABS.map(([name, label]) =>
      h("a", { href: `#/jobs/${job.id}/${name}`, "aria-current": name === shown ? "page" : null }, label,
        name === "exceptions" && failures.length > 0 && h("span", { class: "badge" }, count(failures.length))))),
  ];
}

function summary(job, checkpoints, failures) {
  const sources = job.tasks.filter((task) => task.isSource);
  const sinks = job.tasks.filter((task) => task.isSink);
  const sum = (tasks, name) => tasks.reduce((found, task) => (task[name] === null ? found : (found ?? 0) + task[name]), null);
  const marks = sinks.map((task) => task.watermark).filter((mark) => isInstant(mark));
  const slowest = marks.length ? Math.min(...marks) : null;
  const latest = checkpoints?.latest?.completed;
  const failed = checkpoints?.latest?.failed;
  const failedLast = failed && (!latest || failed.failure_timestamp > latest.latest_ack_timestamp);
  const busiest = [...job.tasks].sort((a, b) => (b.busy ?? 0) - (a.busy ?? 0))[0];
  return figures([
    [job.over ? "Ran for" : "Running for", duration(job.duration), `since ${moment(job.start)}`],
    ["Read", rate(job.over ? null : sum(sources, "outRate")), `${count(sum(sources, "recordsOut"))} in all`],
    ["Into sinks", rate(job.over ? null : sum(sinks, "inRate")), `${count(sum(sinks, "recordsIn"))} in all`],
    ["Behind the clock", slowest === null || job.over ? nothing : duration(Math.max(0, job.now - slowest)), "event time at the sinks"],
    ["Busiest", busiest?.busy === null || !busiest || job.over ? nothing : `${Math.round(busiest.busy * 100)} %`, busiest?.name],
    ["Last checkpoint", lastCheckpoint(latest, failedLast, job), latest ? `${duration(latest.end_to_end_duration)}, ${bytes(latest.state_size)}` : "none yet"],
    ["Failures", h("span", { class: failures.length ? "text-bad" : null }, count(failures.length)),
      failures.length ? `last at ${moment(failures[0].timestamp)}` : "none"],
  ]);
}

function lastCheckpoint(latest, failedLast, job) {
  if (failedLast) return h("span", { class: "text-bad" }, "failed");
  if (!latest) return nothing;
  return job.over ? `№ ${latest.id}` : `${duration(Math.max(0, job.now - latest.latest_ack_timestamp))} ago`;
}
