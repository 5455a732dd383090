// Numbers and times as people read them. `nothing` stands for what is not known (yet).

export const nothing = "–";
export const WATERMARK_MIN = -(2 ** 62);
export const WATERMARK_MAX = 2 ** 62;

/** Flink's largest long, and what comes near it, stands for never. */
const FOREVER_MS = 1e15;

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** A metric's value: Flink gives strings, and "NaN" for what it does not know. */
export function number(value) {
  if (value === null || value === undefined || value === "") return null;
  const found = Number(value);
  return Number.isFinite(found) ? found : null;
}

/** The name of a task; of a chain its operators. */
export const chain = (name) => name.replaceAll(" -> ", " → ");

export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en-GB") : nothing;
}

/** Three significant digits: 1.23k, 45.6M. */
export function short(value) {
  if (!known(value)) return nothing;
  const size = Math.abs(value);
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit * 0.9995) return three(value / unit) + name;
  }
  if (size > 0 && size < 0.01) return "<0.01";
  return Number.isInteger(value) ? String(value) : three(value);
}

function three(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2).replace(/\.0+$/, "");
}

export function rate(value) {
  return known(value) ? `${short(value)}/s` : nothing;
}

export function bytes(value) {
  if (!known(value) || value < 0) return nothing;
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= unit * 0.9995) return `${three(value / unit)} ${name}`;
  }
  return `${Math.round(value)} B`;
}

export function percent(share) {
  return known(share) ? `${Math.round(share * 100)} %` : nothing;
}

/** A length of time, given in milliseconds: 12 ms, 3.4 s, 5 m 06 s, 2 h 03 m, 4 d 05 h. */
export function duration(ms) {
  if (!known(ms) || ms < 0) return nothing;
  if (ms > FOREVER_MS) return "no limit";
  if (ms > 0 && ms < 1) return "<1 ms";
  if (ms < 1000) return `${ms < 10 ? three(ms) : Math.round(ms)} ms`;
  if (ms < 9_950) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  const two = (part) => String(part).padStart(2, "0");
  if (seconds < 3600) return `${Math.floor(seconds / 60)} m ${two(seconds % 60)} s`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ${two(Math.floor((seconds % 3600) / 60))} m`;
  return `${Math.floor(seconds / 86_400)} d ${two(Math.floor((seconds % 86_400) / 3600))} h`;
}

/** A moment, in the reader's own time zone; the date only where it is not today's. */
export function moment(ms, now = Date.now()) {
  if (!known(ms) || ms < 0) return nothing;
  const date = new Date(ms);
  if (Number.isNaN(date.getTime())) return nothing;
  const two = (part) => String(part).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return date.toDateString() === new Date(now).toDateString() ? time : `${day(date)} ${time}`;
}

function day(date) {
  const two = (part) => String(part).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}

/** Where event time stands, UTC; the date only where it is not that of `now`. It need not be a date: a test counts from 0. */
export function watermark(value, now = Date.now()) {
  if (!known(value) || value <= WATERMARK_MIN) return nothing;
  if (value >= WATERMARK_MAX) return "end";
  if (value < 31_536_000_000 || value > 8.64e15) return String(value);
  const text = new Date(value).toISOString();
  const date = text.slice(0, 10);
  return date === new Date(now).toISOString().slice(0, 10) ? text.slice(11, 21) : `${date} ${text.slice(11, 19)}`;
}

/** Whether event time is one that can be compared with the clock. */
export function isInstant(value) {
  return known(value) && value > 31_536_000_000 && value < 8.64e15;
}
