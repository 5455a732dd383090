// Event time: where each task, subtask and split stands, and who holds the others back.

import { h } from "./dom.js";
import { chain, duration, isInstant, nothing, number, watermark } from "./format.js";
import { markOf } from "./model.js";
import { meter, panel, table } from "./parts.js";

export const wanted = () => ({});

export function view(store, route, job) {
  const rows = job.tasks.flatMap((task) => task.subtasks.map((one) => ({ task, one })));
  const known = rows.filter(({ one }) => isInstant(one.watermark));
  const newest = known.length ? Math.max(...known.map(({ one }) => one.watermark)) : null;
  const oldest = known.length ? Math.min(...known.map(({ one }) => one.watermark)) : null;
  const span = newest === null ? 0 : newest - oldest;
  const holding = holders(job);
  const splits = job.tasks.flatMap((task) => task.subtasks.flatMap((one) => splitsOf(task, one)));
  return [
    panel("Who holds event time back", null, h("div", { class: "body" }, holding.length
      ? h("ul", { class: "holders" }, holding.map(({ task, one, why }) => h("li", { key: `${task.id} ${one.index}` },
        h("a", { href: `#/jobs/${job.id}/graph/${task.id}` }, `${chain(task.name)} (${one.index + 1}/${task.parallelism})`), ` ${why}`)))
      : h("p", { class: "quiet" }, known.length ? "No source: all are within a second of each other." : "No task has a watermark that is a date."))),
    splits.length > 0 && panel("Splits of the sources", null, table("Splits", [
      { name: "Split", class: "name", cell: (split) => h("span", { class: "mono" }, split.name) },
      { name: "Read by", class: "name", cell: (split) => `${split.task.name.split(" -> ")[0]} (${split.index + 1}/${split.task.parallelism})` },
      { name: "Event time", n: true, cell: (split) => watermark(split.watermark) },
      { name: "Behind the newest", n: true, cell: (split) => behind(split.watermark, Math.max(...splits.map((other) => other.watermark ?? -Infinity))) },
      { name: "Behind the clock", n: true, cell: (split) => (isInstant(split.watermark) && !job.over ? duration(Math.max(0, job.now - split.watermark)) : nothing) },
    ], splits.sort((a, b) => (a.watermark ?? -Infinity) - (b.watermark ?? -Infinity)), { keyOf: (split) => `${split.task.id} ${split.index} ${split.name}` })),
    panel("Watermark of each subtask", { note: span ? `${duration(span)} from the first to the last` : null }, table("Watermarks of subtasks", [
      { name: "Task", class: "name", cell: ({ task, one }) => (one.index ? h("span", { class: "quiet" }, chain(task.name)) : h("a", { href: `#/jobs/${job.id}/graph/${task.id}` }, chain(task.name))) },
      { name: "№", n: true, cell: ({ one }) => one.index },
      { name: "In", n: true, cell: ({ task, one }) => (task.isSource ? nothing : watermark(one.inWatermark)) },
      { name: "Out", n: true, cell: ({ one }) => watermark(one.watermark) },
      { name: "Behind the newest", n: true, cell: ({ one }) => behind(one.watermark, newest) },
      { name: "Behind the clock", n: true, cell: ({ one }) => (isInstant(one.watermark) && !job.over ? duration(Math.max(0, one.lag)) : nothing) },
      { name: "", cell: ({ one }) => (span > 0 && isInstant(one.watermark) ? meter(1 - (newest - one.watermark) / span, "Between the oldest and the newest", { warnFrom: 2 }) : null) },
    ], rows, { keyOf: ({ task, one }) => `${task.id} ${one.index}` })),
  ];
}

function behind(mark, newest) {
  return isInstant(mark) && Number.isFinite(newest) ? duration(newest - mark) : nothing;
}

/** A task's event time is its slowest input's: the slowest subtasks of sources, and those who are far behind what they read. */
function holders(job) {
  const found = [];
  const sources = job.tasks.filter((task) => task.isSource).flatMap((task) => task.subtasks.map((one) => ({ task, one })));
  const dated = sources.filter(({ one }) => isInstant(one.watermark));
  const newest = Math.max(...dated.map(({ one }) => one.watermark));
  for (const { task, one } of sources) {
    if (one.watermark === null && !job.over) found.push({ task, one, why: "has given no watermark yet: nothing after it can close a window." });
  }
  for (const { task, one } of [...dated].sort((a, b) => a.one.watermark - b.one.watermark).slice(0, 3)) {
    const late = newest - one.watermark;
    if (late >= 1000) found.push({ task, one, why: `is ${duration(late)} behind the newest source.` });
  }
  for (const task of job.tasks.filter((other) => !other.isSource)) {
    for (const one of task.subtasks) {
      if (isInstant(one.inWatermark) && isInstant(one.watermark) && one.inWatermark - one.watermark >= 1000) {
        found.push({ task, one, why: `passes event time on ${duration(one.inWatermark - one.watermark)} late: it still fires timers.` });
      }
    }
  }
  return found.slice(0, 8);
}

/** Metrics of splits are called "split.<split>.watermark.<name>". */
function splitsOf(task, one) {
  const found = [];
  for (const [name, value] of Object.entries(one.values)) {
    const [, split] = /^split\.(.+)\.watermark\.currentWatermark$/.exec(name) ?? [];
    if (split === undefined) continue;
    found.push({
      task, index: one.index, name: split, watermark: markOf(number(value)),
    });
  }
  return found;
}
