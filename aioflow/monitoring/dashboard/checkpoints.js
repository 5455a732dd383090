// Checkpoints: whether the last one is good, how long their phases take, how large they are, and why some failed.

import { h, s } from "./dom.js";
import { bytes, count, duration, moment, nothing } from "./format.js";
import { figures, missing, pairs, panel, state, table } from "./parts.js";

export const wanted = (route) => (route.rest[0] ? { [`jobs/${route.jobId}/checkpoints/details/${route.rest[0]}`]: 3000 } : {});

export function view(store, route, job) {
  const path = `jobs/${job.id}/checkpoints`;
  const answer = store.value(path);
  if (!answer) return missing(store, path, "checkpoints");
  const { counts, summary, latest, history } = answer;
  const config = store.value(`${path}/config`);
  const chosen = route.rest[0] ? Number(route.rest[0]) : null;
  const failures = history.filter((one) => one.status === "FAILED");
  return [
    figures([
      ["Completed", count(counts.completed)],
      ["Failed", h("span", { class: counts.failed ? "text-bad" : null }, count(counts.failed))],
      ["Under way", count(counts.in_progress)],
      ["Restored", count(counts.restored), latest.restored ? `from № ${latest.restored.id}` : null],
      ["Duration, median", duration(summary?.end_to_end_duration?.p50), `p99 ${duration(summary?.end_to_end_duration?.p99)}`],
      ["State, last", bytes(latest.completed?.state_size), latest.completed ? `${bytes(latest.completed.checkpointed_size)} written` : null],
    ]),
    h("div", { class: "columns" },
      panel("Duration and size", { end: legend() }, h("div", { class: "body" }, bars(history))),
      panel("Latest", null, h("div", { class: "body" }, latestPairs(latest, job))),
      config && panel("Settings", null, h("div", { class: "body" }, settings(config)))),
    failures.length > 0 && panel("Why some failed", null, table("Failed checkpoints", [
      { name: "№", cell: (one) => one.id },
      { name: "At", n: true, cell: (one) => moment(one.failure_timestamp) },
      { name: "Acknowledged", n: true, cell: (one) => `${one.num_acknowledged_subtasks} of ${one.num_subtasks}` },
      { name: "Reason", class: "name wide", cell: (one) => one.failure_message ?? nothing },
    ], failures, { keyOf: (one) => one.id })),
    panel("History", { note: `the last ${history.length}` }, table("History of checkpoints", [
      { name: "№", cell: (one) => h("a", { href: `#/jobs/${job.id}/checkpoints/${one.id === chosen ? "" : one.id}` }, one.id) },
      { name: "State", cell: (one) => state(one.status) },
      { name: "Kind", cell: (one) => kind(one) },
      { name: "Began", n: true, cell: (one) => moment(one.trigger_timestamp) },
      { name: "Took", n: true, cell: (one) => duration(one.status === "IN_PROGRESS" ? Math.max(0, job.now - one.trigger_timestamp) : one.end_to_end_duration) },
      { name: "Acknowledged", n: true, cell: (one) => `${one.num_acknowledged_subtasks} of ${one.num_subtasks}` },
      { name: "Written", n: true, cell: (one) => bytes(one.checkpointed_size) },
      { name: "State size", n: true, cell: (one) => bytes(one.state_size) },
      { name: "In flight", n: true, cell: (one) => bytes(one.persisted_data) },
    ], history, { keyOf: (one) => one.id, chosen: (one) => one.id === chosen, empty: "No checkpoint yet." })),
    chosen !== null && detail(store, job, path, chosen),
  ];
}

function kind(one) {
  return { CHECKPOINT: "checkpoint", UNALIGNED_CHECKPOINT: "unaligned", SAVEPOINT: "savepoint", SYNC_SAVEPOINT: "savepoint to stop" }[one.checkpoint_type]
    ?? (one.is_savepoint ? "savepoint" : "checkpoint");
}

function latestPairs(latest, job) {
  const line = (one) => `№ ${one.id}, ${moment(one.latest_ack_timestamp)}, ${duration(one.end_to_end_duration)}, ${bytes(one.state_size)}`;
  const found = [
    latest.completed && ["Completed", line(latest.completed)],
    latest.completed?.external_path && ["Kept in", h("span", { class: "mono" }, latest.completed.external_path)],
    latest.savepoint && ["Savepoint", line(latest.savepoint)],
    latest.failed && ["Failed", `№ ${latest.failed.id}, ${moment(latest.failed.failure_timestamp)}`],
    latest.failed?.failure_message && ["Because", h("span", { class: "text-bad" }, latest.failed.failure_message)],
    latest.restored && ["Restored", `№ ${latest.restored.id}, ${moment(latest.restored.restore_timestamp)}`],
  ].filter(Boolean);
  return found.length ? pairs(found) : h("p", { class: "quiet" }, job.over ? "There was none." : "None yet.");
}

function settings(config) {
  return pairs([
    ["Mode", String(config.mode).replaceAll("_", " ")], ["Every", duration(config.interval)], ["Time-out", duration(config.timeout)],
    ["Pause between", duration(config.min_pause)], ["At once", count(config.max_concurrent)],
    ["Unaligned", config.unaligned_checkpoints ? `yes, after ${duration(config.aligned_checkpoint_timeout)}` : "no"],
    ["Failures tolerated", config.tolerable_failed_checkpoints >= 2 ** 31 - 1 ? "any number" : count(config.tolerable_failed_checkpoints)], ["State backend", config.state_backend ?? nothing],
    ["Storage", h("span", { class: "mono" }, config.checkpoint_storage ?? nothing)],
  ]);
}

function legend() {
  return h("div", { class: "legend" }, h("span", null, h("i", { class: "swatch f1" }), "duration"), h("span", null, h("i", { class: "swatch f2" }), "state size"));
}

/** Two rows of bars, oldest left: how long each took, and how large it was. */
function bars(history) {
  const shown = history.filter((one) => one.status !== "IN_PROGRESS").slice(0, 40).reverse();
  if (!shown.length) return h("p", { class: "quiet" }, "No checkpoint is complete yet.");
  const [width, row] = [400, 52];
  const step = width / Math.max(shown.length, 12);
  const longest = Math.max(1, ...shown.map((one) => one.end_to_end_duration));
  const largest = Math.max(1, ...shown.map((one) => one.state_size));
  const bar = (one, index, value, most, base, color) => {
    const height = Math.max(1.5, (value / most) * (row - 14));
    return s("rect", {
      class: one.status === "FAILED" ? "failed-bar" : color, x: (index * step + 1).toFixed(1), width: (step - 2).toFixed(1), y: (base - height).toFixed(1), height: height.toFixed(1), rx: 1,
    }, s("title", null, `№ ${one.id} ${one.status.toLowerCase()}: ${duration(one.end_to_end_duration)}, ${bytes(one.state_size)}`));
  };
  return h("figure", { class: "chart" }, s("svg", {
    viewBox: `0 0 ${width} ${2 * row + 6}`, role: "img",
    "aria-label": `The last ${shown.length} checkpoints: at most ${duration(longest)} and ${bytes(largest)}`,
  },
    s("text", { class: "axis", x: 0, y: 10 }, duration(longest)), s("text", { class: "axis", x: 0, y: row + 16 }, bytes(largest)),
    s("line", { class: "grid", x1: 0, x2: width, y1: row, y2: row }), s("line", { class: "grid", x1: 0, x2: width, y1: 2 * row + 5, y2: 2 * row + 5 }),
    shown.map((one, index) => bar(one, index, one.end_to_end_duration, longest, row, "f1")),
    shown.map((one, index) => bar(one, index, one.state_size, largest, 2 * row + 5, "f2"))));
}

/** Each task's part in one checkpoint, with the phases of its slowest subtask. */
function detail(store, job, path, id) {
  const place = `${path}/details/${id}`;
  const answer = store.value(place);
  if (!answer) return panel(`Checkpoint ${id}`, null, missing(store, place, "checkpoint"));
  const rows = Object.entries(answer.tasks ?? {}).map(([vertex, one]) => ({ ...one, vertex, name: job.byId.get(vertex)?.name ?? vertex }));
  return panel(`Checkpoint ${id}`, { note: kind(answer), end: state(answer.status) }, table(`Tasks of checkpoint ${id}`, [
    { name: "Task", class: "name", cell: (one) => one.name },
    { name: "Acknowledged", n: true, cell: (one) => `${one.num_acknowledged_subtasks} of ${one.num_subtasks}` },
    { name: "Last at", n: true, cell: (one) => moment(one.latest_ack_timestamp) },
    { name: "Took", n: true, cell: (one) => duration(one.end_to_end_duration) },
    { name: "Written", n: true, cell: (one) => bytes(one.checkpointed_size) },
    { name: "State size", n: true, cell: (one) => bytes(one.state_size) },
    { name: "Phases of the slowest", cell: (one) => phases(store.value(`${place}/subtasks/${one.vertex}`)) },
  ], rows, { keyOf: (one) => one.vertex, empty: "Nothing has been acknowledged." }));
}

const PHASES = [
  ["start delay", "f8", (one) => one.start_delay], ["alignment", "f4", (one) => one.alignment?.duration], ["sync", "f2", (one) => one.checkpoint?.sync],
  ["async", "f1", (one) => one.checkpoint?.async],
];

function phases(answer) {
  const slowest = (answer?.subtasks ?? []).reduce((worst, one) => ((one.end_to_end_duration ?? -1) > (worst?.end_to_end_duration ?? -1) ? one : worst), null);
  if (!slowest?.checkpoint) return nothing;
  const found = PHASES.map(([name, color, read]) => [name, color, Math.max(0, read(slowest) ?? 0)]);
  const whole = found.reduce((sum, [, , ms]) => sum + ms, 0);
  const text = found.map(([name, , ms]) => `${name} ${duration(ms)}`).join(", ");
  return h("div", null,
    h("span", { class: "phases", role: "img", "aria-label": text, title: text }, found.map(([, color, ms]) =>
      h("i", { class: color, style: { width: `${whole ? (ms / whole) * 100 : 0}%` } }))),
    h("span", { class: "quiet small" }, text));
}

/** What can be asked once it is known that there are checkpoints, and of which tasks. */
export function more(store, route) {
  const path = `jobs/${route.jobId}/checkpoints`;
  const place = `${path}/details/${route.rest[0]}`;
  const tasks = route.rest[0] ? store.value(place)?.tasks : null;
  const paths = Object.keys(tasks ?? {}).map((vertex) => [`${place}/subtasks/${vertex}`, 5000]);
  if (store.value(path)?.counts.total) paths.push([`${path}/config`, 60_000]);
  return Object.fromEntries(paths);
}
