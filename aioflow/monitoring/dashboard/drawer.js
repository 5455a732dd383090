// One task opened beside the graph: what it is made of, how it stands, and each of its subtasks.

import { h } from "./dom.js";
import { bytes, count, duration, isInstant, moment, nothing, percent, rate, watermark } from "./format.js";
import { metered, pairs, shareCell, shares, state, table, timeLegend } from "./parts.js";

export const drawerWanted = (jobId, vertexId) => ({
  [`jobs/${jobId}/vertices/${vertexId}`]: 1000,
  [`jobs/${jobId}/vertices/${vertexId}/accumulators`]: 5000,
});

export function drawer(store, route, job, task) {
  const place = `jobs/${job.id}/vertices/${task.id}`;
  const detail = store.value(place);
  const byIndex = new Map((detail?.subtasks ?? []).map((one) => [one.subtask, one]));
  const rows = task.subtasks.map((one) => ({ ...one, detail: byIndex.get(one.index) }));
  return h("aside", { class: "panel drawer", "aria-label": `Task ${task.name}`, key: task.id },
    h("header", null, h("h2", null, task.name.split(" -> ")[0]), state(task.status),
      h("div", { class: "end" }, h("a", { href: `#/jobs/${job.id}/flame/${task.id}` }, "Flame graph"),
        h("a", { class: "close", href: `#/jobs/${job.id}/graph`, "aria-label": "Close" }, "Close"))),
    task.name.includes(" -> ") && h("section", { key: "chain" }, h("h3", null, "Chain"),
      h("div", { class: "chips" }, task.name.split(" -> ").map((name) => h("span", { class: "chip" }, name)))),
    h("section", { key: "time" }, h("h3", null, "Time spent"), shares(task), timeLegend(), pairs([
      ["Busy", percent(task.busy)],
      ["Back-pressured", [percent(task.pressed), h("span", { class: "quiet" }, level(task.pressed), cause(task))]],
      ["Idle", percent(task.idle)],
    ])),
    h("section", { key: "flow" }, h("h3", null, "Flow"), pairs([
      !task.isSource && ["In", `${rate(task.inRate)}, ${count(task.recordsIn)} records${size(task.bytesIn)}`],
      !task.isSink && ["Out", `${rate(task.outRate)}, ${count(task.recordsOut)} records${size(task.bytesOut)}`],
      task.outUsage !== null && !task.isSink && ["Output buffers", metered(task.outUsage, "Output buffers in use")],
      task.credits !== null && task.isRemote && ["Input buffers", metered(task.inUsage, "Input buffers in use")],
      task.credits !== null && task.isRemote && ["Credits", [count(task.credits), h("span", { class: "quiet" }, " batches may still come from other processes")]],
      task.inQueue !== null && !task.isSource && ["Waiting", [`${count(task.inQueue)} batches`, task.backlog > 0 && h("span", { class: "quiet" }, `, some ${duration(task.backlog)} of work`)]],
      task.timers > 0 && ["Timers", `${rate(task.timerRate)}, ${count(task.timers)} fired`],
      ["Event time", `${watermark(task.watermark)}${task.lag !== null && !job.over && isInstant(task.watermark) ? `, ${duration(Math.max(0, task.lag))} behind the clock` : ""}`],
    ].filter(Boolean))),
    h("section", { key: "subtasks" }, h("h3", null, "Subtasks", task.skew !== null && ` · the fullest gets ${percent(task.skew)} more than the mean`),
      table(`Subtasks of ${task.name}`, [
        { name: "№", n: true, cell: (one) => one.index },
        { name: "Time spent", cell: shareCell },
        { name: "Rate", n: true, cell: (one) => rate(task.isSource ? one.outRate : one.inRate) },
        { name: "Records", n: true, cell: (one) => count(task.isSource ? one.recordsOut : one.recordsIn) },
        { name: "Event time", n: true, cell: (one) => watermark(one.watermark) },
      ], rows, { keyOf: (one) => one.index, tight: true })),
    h("section", { key: "attempts" }, h("h3", null, "Attempts"),
      table(`Attempts of ${task.name}`, [
        { name: "№", n: true, cell: (one) => one.index },
        { name: "State", cell: (one) => state(one.detail?.status ?? task.status) },
        { name: "Attempt", n: true, cell: (one) => (one.detail ? count(one.detail.attempt + 1) : nothing) },
        { name: "Since", n: true, cell: (one) => moment(one.detail?.["start-time"]) },
        { name: "Mails", n: true, cell: (one) => (one.mailboxQueue === null ? nothing : `${count(one.mailboxQueue)}, ${duration(one.mailboxLatency)}`) },
        { name: "Worker", cell: (one) => h("span", { class: "mono" }, one.detail?.["taskmanager-id"] || one.detail?.host || nothing) },
      ], rows, { keyOf: (one) => one.index, tight: true })),
    accumulators(store.value(`${place}/accumulators`)?.["user-accumulators"]));
}

/** Flink's words: up to a tenth of the time is ok, up to a half low. */
function level(share) {
  return share === null ? "" : share <= 0.1 ? ", ok" : share <= 0.5 ? ", low" : ", high";
}

function cause(task) {
  const soft = task.subtasks.reduce((sum, one) => sum + (one.soft ?? 0), 0);
  const hard = task.subtasks.reduce((sum, one) => sum + (one.hard ?? 0), 0);
  if ((task.pressed ?? 0) < 0.01 || soft + hard === 0) return null;
  return hard > soft ? ", within a record" : ", between records";
}

function size(value) {
  return value ? `, ${bytes(value)}` : "";
}

function accumulators(list) {
  if (!list?.length) return null;
  return h("section", { key: "accumulators" }, h("h3", null, "Counted by the program"),
    pairs(list.map((one) => [one.name, h("span", { class: "mono" }, one.value)])));
}
