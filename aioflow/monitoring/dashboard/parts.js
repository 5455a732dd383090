// What several views are made of.

import { h } from "./dom.js";
import { nothing, percent } from "./format.js";

const GOOD = new Set(["RUNNING", "COMPLETED"]);
const BAD = new Set(["FAILED", "FAILING", "CANCELED", "CANCELLING", "CANCELING"]);
const WAIT = new Set(["INITIALIZING", "CREATED", "SCHEDULED", "DEPLOYING", "RESTARTING", "RECONCILING", "SUSPENDED", "IN_PROGRESS"]);

/** The state of a job, a task or a checkpoint: a word beside a coloured dot. */
export function state(name) {
  const text = String(name ?? nothing);
  const kind = GOOD.has(text) ? "good" : BAD.has(text) ? "bad" : WAIT.has(text) ? "wait" : "";
  return h("span", { class: `state ${kind}` }, text.toLowerCase().replaceAll("_", " "));
}

export function panel(title, attributes, ...content) {
  const { end, note, ...rest } = attributes ?? {};
  return h("section", { ...rest, class: `panel ${rest.class ?? ""}` },
    h("header", null, h("h2", null, title), note && h("span", { class: "quiet" }, note), end && h("div", { class: "end" }, end)),
    ...content);
}

/** [[label, value, remark]]: the figures at the top of a view. */
export function figures(list) {
  return h("dl", { class: "figures" }, list.map(([label, value, remark]) =>
    h("div", { key: label }, h("dt", null, label), h("dd", null, value, remark && h("small", null, remark)))));
}

export function pairs(list) {
  return h("dl", { class: "pairs" }, list.map(([label, value]) => [h("dt", null, label), h("dd", null, value)]));
}

/** columns: [{name, n (a number: to the right), cell(row)}]. `label` says what the table is about to those who do not see it. */
export function table(label, columns, rows, { keyOf, chosen, tight, empty = "Nothing yet." } = {}) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", { class: tight ? "tight" : null },
      h("caption", { class: "hidden" }, label),
      h("thead", null, h("tr", null, columns.map((column) => h("th", { scope: "col", class: column.n ? "n" : null }, column.name)))),
      h("tbody", null, rows.map((row, index) =>
        h("tr", { key: keyOf ? keyOf(row) : index, class: chosen?.(row) ? "chosen" : null },
          columns.map((column) => h("td", { class: `${column.n ? "n" : ""} ${column.class ?? ""}`.trim() || null }, column.cell(row))))))));
}

/** How a task spends its time, as a bar of three parts. */
export function shares({ busy, pressed, idle }) {
  const text = busy === null ? "not known" : `busy ${percent(busy)}, back-pressured ${percent(pressed)}, idle ${percent(idle)}`;
  const part = (kind, share) => h("i", { class: kind, style: { width: `${(Math.min(1, Math.max(0, share ?? 0)) * 100).toFixed(1)}%` } });
  return h("span", { class: "share", role: "img", "aria-label": text, title: text },
    part("busy", busy), part("pressed", pressed), part("idle", idle));
}

export function shareCell(task) {
  const pressed = (task.pressed ?? 0) > (task.busy ?? 0);
  return h("div", { class: "share-cell" }, shares(task),
    h("b", { class: pressed ? "text-pressed" : (task.busy ?? 0) >= 0.8 ? "text-busy" : null }, percent(pressed ? task.pressed : task.busy)));
}

export function meter(share, label, { warnFrom = 0.9 } = {}) {
  const known = share !== null && share !== undefined && Number.isFinite(share);
  const text = `${label}: ${known ? percent(share) : "not known"}`;
  return h("span", { class: `meter ${known && share >= warnFrom ? "warn" : ""}`, role: "img", "aria-label": text, title: text },
    h("i", { style: { width: `${known ? Math.min(1, Math.max(0, share)) * 100 : 0}%` } }));
}

/** A meter and its number. */
export function metered(share, label, options) {
  return h("span", { class: "metered" }, meter(share, label, options), h("span", { class: "quiet" }, percent(share)));
}

export function timeLegend() {
  return h("div", { class: "legend" },
    h("span", null, h("i", { class: "swatch busy" }), "busy"),
    h("span", null, h("i", { class: "swatch pressed" }), "back-pressured"),
    h("span", null, h("i", { class: "swatch idle" }), "idle"));
}

/** What stands where an answer should: it is on its way, there is none, or why not. */
export function missing(store, path, what) {
  const error = store.error(path);
  if (error?.status === 404) return h("p", { class: "empty" }, `No ${what} here: ${error.message}`);
  if (error) return h("p", { class: "empty text-bad" }, `Could not read the ${what}: ${error.message}`);
  return h("p", { class: "empty" }, `Reading the ${what} …`);
}
