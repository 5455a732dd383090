// What the subtasks of a job report, second by second: a stream of events, each the change since the one before (RFC 7396).
//
// Where no stream is to be had (too many are open, or another server answers), the metrics of each vertex are asked for instead.

import { METRICS, subtaskValues } from "./model.js";
import { events } from "./stream.js";

const EVERY_MS = 1000;
const OVER_MS = 60_000;
const AGAIN_MS = 2000;

export class Live {
  constructor(store, changed) {
    this.store = store;
    this.changed = changed;
    this.paths = new Map();
    this.jobId = null;
    this.abort = null;
    this.retry = 0;
    this.state = null;
  }

  /** Follow the stream of this job from now on; null: of none. */
  follow(jobId) {
    if (jobId === this.jobId) return;
    this.jobId = jobId;
    clearTimeout(this.retry);
    this.abort?.abort();
    this.state = null;
    if (jobId !== null) this.listen(jobId);
  }

  async listen(jobId) {
    const abort = new AbortController();
    this.abort = abort;
    try {
      for await (const { name, body } of events(`jobs/${jobId}/events`, abort.signal)) {
        if (abort.signal.aborted) return;
        this.state = name === "delta" && this.state ? merged(this.state, body) : body;
        this.changed();
      }
    } catch {
      // The process is gone, or the view is another one: what is known until then is shown as it was.
    }
    if (this.abort !== abort || abort.signal.aborted) return;
    this.state = null;
    this.changed();
    this.retry = setTimeout(() => this.listen(jobId), AGAIN_MS);
  }

  get streams() {
    return this.state !== null;
  }

  /** What is to be asked besides: nothing while the stream runs. */
  wanted(job) {
    this.paths = new Map();
    if (this.streams) return {};
    for (const task of job?.tasks ?? []) {
      const names = task.subtasks.flatMap((one) => METRICS.map((name) => `${one.index}.${name}`));
      this.paths.set(task.id, `jobs/${job.id}/vertices/${task.id}/metrics?get=${names.join(",")}`);
    }
    return Object.fromEntries([...this.paths.values()].map((path) => [path, job.over ? OVER_MS : EVERY_MS]));
  }

  /** Map of vertex id to a list of {name: value}, one for each subtask. */
  values() {
    if (!this.streams) return new Map([...this.paths].map(([id, path]) => [id, subtaskValues(this.store.value(path))]));
    return new Map(Object.entries(this.state.vertices).map(([id, vertex]) => {
      const list = [];
      for (const [index, one] of Object.entries(vertex.subtasks)) list[Number(index)] = one.metrics ?? {};
      return [id, list];
    }));
  }

  /** The answer of GET /jobs/:id with what has changed since. */
  newest(detail) {
    if (!this.streams) return detail;
    const { now, job, vertices } = this.state;
    return {
      ...detail, now: Math.max(now, detail.now), state: job.state, "end-time": job["end-time"],
      vertices: detail.vertices.map((vertex) => ({ ...vertex, status: vertices[vertex.id]?.status ?? vertex.status })),
    };
  }
}

function merged(target, patch) {
  const found = { ...target };
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete found[name];
    else if (typeof value === "object" && !Array.isArray(value)) found[name] = merged(typeof found[name] === "object" && found[name] !== null ? found[name] : {}, value);
    else found[name] = value;
  }
  return found;
}
