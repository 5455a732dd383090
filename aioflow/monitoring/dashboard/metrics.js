// The last ten minutes as plots, from what the process itself remembers: of all tasks, or of each subtask of one of them.

import { h } from "./dom.js";
import { chart, COLORS } from "./charts.js";
import { chain, bytes, duration, isInstant, moment, percent, rate, short } from "./format.js";
import { panel } from "./parts.js";
import { get } from "./store.js";

const WINDOW_MS = 600_000;
const EVERY_MS = 2000;
const NAMES_A_CALL = 60; // A longer address would be refused.
const NAMES_MAX = 600;

/** [metric, title, format, how subtasks are put together, what is shown of a value, top of the axis] */
const TASK_PLOTS = [
  ["numRecordsInPerSecond", "Records in", rate, "sum", null, null],
  ["numRecordsOutPerSecond", "Records out", rate, "sum", null, null],
  ["busyTimeMsPerSecond", "Busy", percent, "mean", (value) => value / 1000, 1],
  ["backPressuredTimeMsPerSecond", "Back-pressured", percent, "mean", (value) => value / 1000, 1],
  ["currentOutputWatermark", "Event time behind the clock", duration, "max", (value, at) => (isInstant(value) ? Math.max(0, at - value) : null), null],
  ["Shuffle.Netty.Output.Buffers.outPoolUsage", "Output buffers in use", percent, "max", null, null],
  ["mailboxLatencyMs", "Mailbox latency", duration, "max", null, null],
  ["latencyMsP99", "Latency from the sources, p99", duration, "max", null, null],
];
const JOB_PLOTS = [
  ["lastCheckpointDuration", "Duration of checkpoints", duration], ["lastCheckpointSize", "Size of checkpoints", bytes],
];

const TOGETHER = {
  sum: (values) => values.reduce((sum, value) => sum + value, 0),
  mean: (values) => values.reduce((sum, value) => sum + value, 0) / values.length,
  max: (values) => Math.max(...values),
};

export const wanted = () => ({});

let known = null;
let pointer = null;

/** Values of one job by name, asked for a piece at a time: only what came since the last piece. */
class Series {
  constructor(jobId) {
    this.jobId = jobId;
    this.points = new Map();
    this.newest = new Map();
    this.asked = 0;
    this.busy = false;
    this.error = null;
  }

  async ask(names, redraw) {
    if (this.busy || Date.now() - this.asked < EVERY_MS) return;
    this.busy = true;
    try {
      for (let first = 0; first < Math.min(names.length, NAMES_MAX); first += NAMES_A_CALL) await this.piece(names.slice(first, first + NAMES_A_CALL));
      this.error = null;
    } catch (error) {
      this.error = error;
    }
    this.asked = Date.now();
    this.busy = false;
    redraw();
  }

  async piece(names) {
    // All of a piece are asked from the same moment on: the earliest that one of them lacks.
    const since = Math.min(...names.map((name) => this.newest.get(name) ?? 0));
    const { times, series } = await get(`aioflow/jobs/${this.jobId}/series?metric=${encodeURIComponent(names.join(","))}&since=${since}`);
    for (const name of names) {
      const points = (this.points.get(name) ?? []).filter(([at]) => at <= since);
      const values = series[name] ?? [];
      times.forEach((at, index) => points.push([at, values[index] ?? null]));
      const from = (points.at(-1)?.[0] ?? 0) - WINDOW_MS;
      this.points.set(name, points.filter(([at]) => at >= from));
      if (points.length) this.newest.set(name, points.at(-1)[0]);
    }
  }
}

export function view(store, route, job, page) {
  if (known?.jobId !== job.id) known = new Series(job.id);
  const chosen = job.byId.get(route.rest[0]);
  const custom = chosen && route.rest[1] ? [[route.rest[1], route.rest[1], short, "sum", null, null]] : [];
  const plots = [...custom, ...TASK_PLOTS];
  const tasks = chosen ? [chosen] : job.tasks;
  const names = [...plots.flatMap(([metric]) => tasks.flatMap((task) => task.subtasks.map((one) => `${task.id}.${one.index}.${metric}`))), ...JOB_PLOTS.map(([name]) => name)];
  known.ask(names, page.redraw);
  const newest = Math.max(...known.newest.values(), 0);
  const oldest = Math.min(...[...known.points.values()].map((points) => points[0]?.[0] ?? newest), newest);
  const axis = { from: Math.max(newest - WINDOW_MS, Math.min(oldest, newest - 60_000)), to: newest, moment, at: pointer, onAt: (at) => { pointer = at; page.redraw(); } };
  return [
    choice(job, chosen, route.rest[1]),
    known.error && h("p", { class: "text-bad" }, `Could not read the last ten minutes: ${known.error.message}`),
    newest === 0 ? h("p", { class: "empty" }, "Reading the last ten minutes …") : h("div", { class: "charts" },
      plots.map(([metric, title, format, how, shown, max]) => {
        const lines = chosen ? ofSubtasks(chosen, metric, shown) : ofTasks(tasks, metric, how, shown);
        return lines.length > 0 && panel(title, { key: metric, note: lines.length > COLORS ? `${lines.length} lines` : null },
          h("div", { class: "body" }, chart(title, lines, { ...axis, format, max })));
      }),
      !chosen && JOB_PLOTS.map(([name, title, format]) => has(name) && panel(title, { key: name },
        h("div", { class: "body" }, chart(title, [{ name: job.name, points: known.points.get(name) }], { ...axis, format }))))),
  ];
}

function has(name) {
  return (known.points.get(name) ?? []).some(([, value]) => value !== null);
}

function ofSubtasks(task, metric, shown) {
  return task.subtasks.map((one) => ({ name: `${task.parallelism > 1 ? `subtask ${one.index}` : chain(task.name)}`, points: valuesOf(`${task.id}.${one.index}.${metric}`, shown) }))
    .filter((line) => line.points.some(([, value]) => value !== null));
}

function valuesOf(name, shown) {
  const points = known.points.get(name) ?? [];
  return shown ? points.map(([at, value]) => [at, value === null ? null : shown(value, at)]) : points;
}

function ofTasks(tasks, metric, how, shown) {
  return tasks.map((task) => {
    const subtasks = task.subtasks.map((one) => valuesOf(`${task.id}.${one.index}.${metric}`, shown));
    const points = (subtasks[0] ?? []).map(([at], index) => {
      const values = subtasks.map((list) => list[index]?.[1] ?? null).filter((value) => value !== null);
      return [at, values.length ? TOGETHER[how](values) : null];
    });
    return { name: chain(task.name), points };
  }).filter((line) => line.points.some(([, value]) => value !== null));
}

function choice(job, chosen, metric) {
  const all = chosen ? [...new Set(chosen.subtasks.flatMap((one) => Object.keys(one.values)))].sort() : [];
  const go = (task, name) => { location.hash = `#/jobs/${job.id}/metrics${task ? `/${task}` : ""}${name ? `/${encodeURIComponent(name)}` : ""}`; };
  return h("div", { class: "choices" },
    h("label", null, "Task ", h("select", { onchange: (event) => go(event.target.value, "") },
      h("option", { value: "", selected: !chosen }, "all of them"),
      job.tasks.map((task) => h("option", { key: task.id, value: task.id, selected: task === chosen }, chain(task.name))))),
    chosen && h("label", null, "One more metric ", h("select", { onchange: (event) => go(chosen.id, event.target.value) },
      h("option", { value: "", selected: !metric }, "none"),
      all.map((name) => h("option", { key: name, value: name, selected: name === metric }, name)))));
}
