// What the page knows: answers of the REST endpoints that the shown view needs, asked again at their own pace, and the events of a job.
//
// Addresses are relative to this module, so that the page works wherever the application is mounted.

export const BASE = new URL("..", import.meta.url);
const TIMEOUT_MS = 15_000;

/** What went wrong with a request, in words that can be shown. `status` is 0 without an answer. */
export class RequestFailed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let token = "";

/** The token of this endpoint, where it guards reading; the page forgets it when it is closed. */
export function useToken(given) {
  token = given;
}

export const authorization = () => (token ? { Authorization: `Bearer ${token}` } : {});

export async function get(path, { text = false } = {}) {
  return request(path, { text });
}

/** A changing call. */
export async function change(method, path, body) {
  return request(path, { method, body });
}

async function request(path, { method = "GET", body, text = false } = {}) {
  const headers = { Accept: text ? "text/plain" : "application/json", ...authorization() };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, BASE), {
      method, headers, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body), signal: AbortSignal.timeout(TIMEOUT_MS),
    });
  } catch (error) {
    throw new RequestFailed(0, error.name === "TimeoutError" ? "no answer in 15 s" : "the process does not answer");
  }
  if (!response.ok) {
    const found = await response.json().catch(() => null);
    throw new RequestFailed(response.status, found?.errors?.join("; ") || `${response.status} ${response.statusText}`);
  }
  if (text) return response.text();
  return response.status === 204 ? null : response.json();
}

/** Asks again and again for the paths that the shown view needs. `changed` is called after each answer. */
export class Store {
  constructor(changed) {
    this.changed = changed;
    this.entries = new Map();
    this.answered = 0;
    this.silent = null;
    this.locked = false;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.refresh();
    });
  }

  /** What is to be known from now on: {path: milliseconds between two questions}. The rest is forgotten. */
  need(wanted) {
    for (const [path, entry] of this.entries) {
      if (path in wanted) continue;
      clearTimeout(entry.timer);
      entry.dropped = true;
      this.entries.delete(path);
    }
    for (const [path, every] of Object.entries(wanted)) {
      const entry = this.entries.get(path);
      if (entry) {
        entry.every = every;
      } else {
        const made = { path, every, value: undefined, error: null, timer: 0, dropped: false, busy: false };
        this.entries.set(path, made);
        this.ask(made);
      }
    }
  }

  /** The newest answer, undefined before the first. */
  value(path) {
    return this.entries.get(path)?.value;
  }

  error(path) {
    return this.entries.get(path)?.error ?? null;
  }

  /** Ask for everything at once. */
  refresh() {
    this.locked = false;
    for (const entry of this.entries.values()) this.soon(entry, 0);
  }

  soon(entry, ms) {
    clearTimeout(entry.timer);
    entry.timer = setTimeout(() => this.ask(entry), ms);
  }

  async ask(entry) {
    if (entry.busy || entry.dropped) return;
    entry.busy = true;
    try {
      entry.value = await get(entry.path);
      entry.error = null;
      this.silent = null;
      this.locked = false;
      this.answered = Date.now();
    } catch (error) {
      entry.error = error instanceof RequestFailed ? error : new RequestFailed(0, String(error));
      if (entry.error.status === 0) this.silent ??= Date.now();
      else this.silent = null;
      if (entry.error.status === 401) this.locked = true;
    }
    entry.busy = false;
    if (entry.dropped) return;
    this.changed();
    if (!document.hidden && !this.locked) this.soon(entry, entry.every);
  }
}
