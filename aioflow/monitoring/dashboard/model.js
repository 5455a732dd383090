// A job as the views read it, put together from the answers of the REST endpoints and the values that its subtasks report.

import { number, WATERMARK_MAX, WATERMARK_MIN } from "./format.js";

const BUFFERS_OUT = "Shuffle.Netty.Output.Buffers.";
const BUFFERS_IN = "Shuffle.Netty.Input.Buffers.";

/** What the page asks of each subtask, under Flink's names. */
export const METRICS = [
  "busyTimeMsPerSecond", "backPressuredTimeMsPerSecond", "idleTimeMsPerSecond", "softBackPressuredTimeMsPerSecond",
  "hardBackPressuredTimeMsPerSecond", "numRecordsInPerSecond", "numRecordsOutPerSecond", "numRecordsIn", "numRecordsOut",
  "currentInputWatermark", "currentOutputWatermark", `${BUFFERS_IN}inputQueueLength`, `${BUFFERS_IN}inPoolUsage`,
  `${BUFFERS_OUT}outputQueueLength`, `${BUFFERS_OUT}outPoolUsage`, "mailboxQueueSize", "mailboxLatencyMs",
  `${BUFFERS_IN}inputCredits`, "Shuffle.Netty.Input.numBuffersInRemote", "numBytesInPerSecond", "estimatedTimeToConsumeBuffersMs",
  "numFiredTimers", "numFiredTimersPerSecond",
];

/** detail: of GET /jobs/:id. live: Map of vertex id to a list of {name: value}, one for each subtask; missing is empty. */
export function jobOf(detail, live, now = detail.now) {
  const nodes = new Map((detail.plan?.nodes ?? []).map((node) => [node.id, node]));
  const ids = new Set(detail.vertices.map((vertex) => vertex.id));
  const edges = detail.vertices.flatMap((vertex) => (nodes.get(vertex.id)?.inputs ?? [])
    .filter((input) => ids.has(input.id))
    .map((input, index) => ({ source: input.id, target: vertex.id, index, strategy: input.ship_strategy ?? "" })));
  const tasks = detail.vertices.map((vertex) => taskOf(vertex, live.get(vertex.id) ?? [], edges, now));
  const byId = new Map(tasks.map((task) => [task.id, task]));
  for (const edge of edges) describe(edge, edges, byId);
  return {
    id: detail.jid, name: detail.name, state: detail.state, start: detail["start-time"], end: detail["end-time"],
    duration: detail.duration, now, over: detail["end-time"] > 0, stoppable: detail.isStoppable, tasks, edges, byId,
  };
}

function taskOf(vertex, values, edges, now) {
  const isSource = !edges.some((edge) => edge.target === vertex.id);
  const isSink = !edges.some((edge) => edge.source === vertex.id);
  const subtasks = [];
  for (let index = 0; index < vertex.parallelism; index++) subtasks.push(subtaskOf(index, values[index] ?? {}, now));
  const sum = (name) => total(subtasks.map((one) => one[name]));
  const mean = (name) => average(subtasks.map((one) => one[name]));
  const marks = subtasks.map((one) => one.watermark).filter((value) => value !== null);
  const watermark = marks.length ? Math.min(...marks) : null;
  return {
    id: vertex.id, name: vertex.name, parallelism: vertex.parallelism, maxParallelism: vertex.maxParallelism, status: vertex.status,
    counts: vertex.tasks, start: vertex["start-time"], duration: vertex.duration, isSource, isSink, subtasks,
    busy: mean("busy"), pressed: mean("pressed"), idle: mean("idle"), inRate: sum("inRate"), outRate: sum("outRate"),
    recordsIn: number(vertex.metrics?.["read-records"]) ?? sum("recordsIn"),
    recordsOut: number(vertex.metrics?.["write-records"]) ?? sum("recordsOut"),
    bytesIn: number(vertex.metrics?.["read-bytes"]), bytesOut: number(vertex.metrics?.["write-bytes"]),
    credits: sum("credits"), isRemote: (sum("remoteBatches") ?? 0) > 0, byteRate: sum("byteRate"), backlog: highest(subtasks, "backlog"),
    timers: sum("timers"), timerRate: sum("timerRate"),
    inQueue: sum("inQueue"), outQueue: sum("outQueue"), inUsage: highest(subtasks, "inUsage"), outUsage: highest(subtasks, "outUsage"),
    watermark, lag: lagOf(watermark, now), skew: skewOf(subtasks, isSource ? "outRate" : "inRate"),
  };
}

function subtaskOf(index, values, now) {
  const share = (name) => {
    const found = number(values[name]);
    return found === null ? null : Math.min(1, Math.max(0, found / 1000));
  };
  const value = (name) => number(values[name]);
  const watermark = markOf(value("currentOutputWatermark") ?? value("currentInputWatermark"));
  return {
    index, values,
    busy: share("busyTimeMsPerSecond"), pressed: share("backPressuredTimeMsPerSecond"), idle: share("idleTimeMsPerSecond"),
    soft: share("softBackPressuredTimeMsPerSecond"), hard: share("hardBackPressuredTimeMsPerSecond"),
    inRate: value("numRecordsInPerSecond"), outRate: value("numRecordsOutPerSecond"),
    recordsIn: value("numRecordsIn"), recordsOut: value("numRecordsOut"),
    inQueue: value(`${BUFFERS_IN}inputQueueLength`), inUsage: value(`${BUFFERS_IN}inPoolUsage`),
    outQueue: value(`${BUFFERS_OUT}outputQueueLength`), outUsage: value(`${BUFFERS_OUT}outPoolUsage`),
    credits: value(`${BUFFERS_IN}inputCredits`), remoteBatches: value("Shuffle.Netty.Input.numBuffersInRemote"),
    byteRate: value("numBytesInPerSecond"), backlog: value("estimatedTimeToConsumeBuffersMs"),
    timers: value("numFiredTimers"), timerRate: value("numFiredTimersPerSecond"),
    mailboxQueue: value("mailboxQueueSize"), mailboxLatency: value("mailboxLatencyMs"),
    inWatermark: markOf(value("currentInputWatermark")), watermark, lag: lagOf(watermark, now),
  };
}

/** Null is: none has been seen yet. */
export function markOf(value) {
  return value === null || value <= WATERMARK_MIN ? null : value;
}

export function lagOf(watermark, now) {
  return watermark === null || watermark >= WATERMARK_MAX ? null : now - watermark;
}

/** How much more the fullest subtask gets than the mean one: 0 is even, 1 is twice as much. Null where there is nothing to compare. */
export function skewOf(subtasks, name) {
  const values = subtasks.map((one) => one[name]).filter((value) => value !== null);
  const mean = average(values);
  return values.length < 2 || !mean ? null : Math.max(...values) / mean - 1;
}

/**
 * An edge's rate is known where one of its ends has no other edge on that side. Its room is what its producer may still buffer, and what
 * its consumer may still be sent from other processes: the tighter of both.
 */
function describe(edge, edges, byId) {
  const source = byId.get(edge.source);
  const target = byId.get(edge.target);
  const onlyIn = edges.filter((other) => other.target === edge.target).length === 1;
  const onlyOut = edges.filter((other) => other.source === edge.source).length === 1;
  edge.rate = onlyIn ? target.inRate : onlyOut ? source.outRate : null;
  edge.fill = source.outUsage === null ? null : Math.max(source.outUsage, onlyIn ? target.inUsage ?? 0 : 0);
  edge.byteRate = onlyIn && target.isRemote ? target.byteRate : null;
  const queued = onlyOut ? source.outQueue : null;
  edge.about = [
    `${source.name} to ${target.name}`, edge.strategy && `by ${edge.strategy.toLowerCase()}`,
    source.outUsage !== null && `output buffers ${Math.round(source.outUsage * 100)} % full`,
    onlyIn && target.isRemote && `${target.credits} credits for what comes from other processes`, queued !== null && `${queued} batches wait to be sent`,
    onlyIn && target.inQueue !== null && `${target.inQueue} batches wait to be read`,
  ].filter(Boolean).join(", ");
}

function total(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
}

function average(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function highest(subtasks, name) {
  const known = subtasks.map((one) => one[name]).filter((value) => value !== null);
  return known.length ? Math.max(...known) : null;
}

/** Values of subtasks from [{id: "0.name", value: "1.0"}], the answer of GET /jobs/:id/vertices/:vid/metrics?get=... */
export function subtaskValues(answer) {
  const found = [];
  for (const { id, value } of answer ?? []) {
    const [, index, name] = /^(\d+)\.(.*)$/.exec(id) ?? [];
    if (index !== undefined) (found[Number(index)] ??= {})[name] = value;
  }
  return found;
}
