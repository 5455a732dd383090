// What failed, where, with which record, and what became of the job.

import { h } from "./dom.js";
import { count, duration, moment } from "./format.js";
import { missing, pairs, panel, state, table } from "./parts.js";

export const wanted = () => ({});

export function view(store, route, job) {
  const path = `jobs/${job.id}/exceptions?maxExceptions=20`;
  const answer = store.value(path);
  if (!answer) return missing(store, path, "exceptions");
  const entries = answer.exceptionHistory?.entries ?? [];
  return [
    entries.length === 0 && panel("Exceptions", null, h("p", { class: "empty" }, "Nothing has failed.")),
    entries.map((entry, index) => failure(job, entry, index, entries[index + 1])),
    answer.exceptionHistory?.truncated && h("p", { class: "quiet" }, "There were more: only the newest are kept."),
    history(store.value(`jobs/${job.id}`)),
  ];
}

/** Without the attempt, which Flink counts from 0 in the name of a task, and people from 1. */
function taskOf(entry) {
  return entry.taskName?.replace(/ - execution #\d+$/, "");
}

function failure(job, entry, index, before) {
  const lines = String(entry.stacktrace ?? "").trimEnd().split("\n");
  const vertex = entry["vertex-id"];
  const task = taskOf(entry) ?? "The job as a whole";
  return panel(vertex ? h("a", { href: `#/jobs/${job.id}/graph/${vertex}` }, task) : task, {
    key: `${entry.timestamp} ${entry.taskName}`, class: "failure",
    end: [before && `${duration(entry.timestamp - before.timestamp)} after the one before`, h("time", null, moment(entry.timestamp))],
  },
    h("div", { class: "body" },
      h("p", { class: "text-bad reason" }, entry.message || lines.at(-1) || entry.exceptionName),
      pairs([
        ["Exception", h("code", null, entry.exceptionName)],
        entry.notes?.length && ["Where", entry.notes.map((note) => h("p", { class: "mono" }, note))],
        entry.attempt !== null && entry.attempt !== undefined && ["Attempt", count(entry.attempt + 1)],
        (entry.taskManagerId || entry.location) && ["Worker", h("span", { class: "mono" }, entry.taskManagerId ?? entry.location)],
      ].filter(Boolean)),
      h("details", { open: index === 0 }, h("summary", null, "Traceback"), trace(lines)),
      (entry.concurrentExceptions ?? []).map((other) => h("details", null,
        h("summary", null, `At the same time: ${taskOf(other) ?? other.exceptionName}`), trace(String(other.stacktrace ?? "").trimEnd().split("\n"))))));
}

/** A traceback in which the program's own frames stand out, and those of the engine are folded. */
function trace(lines) {
  const parts = [];
  let kind = "";
  for (const line of lines) {
    if (/^ *File "/.test(line)) kind = /[/\\]aioflow[/\\][a-z_]+[/\\][a-z_]+\.py"/.test(line) ? "engine" : "own";
    else if (!/^ /.test(line)) kind = "";
    if (parts.at(-1)?.kind === kind) parts.at(-1).lines.push(line);
    else parts.push({ kind, lines: [line] });
  }
  return h("div", { class: "trace", tabindex: "0", role: "region", "aria-label": "Traceback" }, parts.map((part) => {
    const text = part.lines.join("\n");
    if (part.kind !== "engine") return h("pre", { class: part.kind || null }, text);
    const frames = part.lines.filter((line) => /^ *File "/.test(line)).length;
    return h("details", null, h("summary", null, frames === 1 ? "one frame of the engine" : `${frames} frames of the engine`), h("pre", null, text));
  }));
}

/** The states that the job went through, newest first. */
function history(detail) {
  const states = Object.entries(detail?.timestamps ?? {}).filter(([, at]) => at > 0).sort((a, b) => b[1] - a[1]);
  return panel("States of the job", { note: detail?.restarts === undefined ? null : `${count(detail.restarts)} restarts` }, table("States of the job", [
    { name: "State", cell: ([name]) => state(name) },
    { name: "Entered", n: true, cell: ([, at]) => moment(at) },
  ], states, { keyOf: ([name]) => name }));
}
