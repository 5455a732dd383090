// Keyed state: which operators keep some, how many keys each subtask holds, and what belongs to a key.

import { h } from "./dom.js";
import { withToken } from "./control.js";
import { bytes, count, nothing } from "./format.js";
import { meter, missing, panel, table } from "./parts.js";
import { get } from "./store.js";

export const wanted = (route) => ({ [`aioflow/jobs/${route.jobId}/state`]: 5000 });

let seen = { place: null, answer: null, error: null, key: "" };

export function view(store, route, job, page) {
  const path = `aioflow/jobs/${job.id}/state`;
  const operators = store.value(path)?.operators;
  if (!operators) return missing(store, path, "state");
  const rows = operators.flatMap((operator) => names(operator).map((name) => ({ operator, name, subtasks: ofName(operator, name) })));
  const [uid, name] = route.rest;
  const chosen = rows.find((row) => row.operator.operator === uid && row.name === name);
  const href = (row) => `#/jobs/${job.id}/state/${encodeURIComponent(row.operator.operator)}/${encodeURIComponent(row.name)}`;
  return [
    panel("Keyed state", null, table("Keyed state", [
      { name: "Operator", class: "name", cell: (row) => row.operator.name },
      { name: "State", class: "name", cell: (row) => h("a", { href: href(row) }, row.name) },
      { name: "Keys", n: true, cell: (row) => keys(row.subtasks) },
      { name: "In subtasks", cell: (row) => spread(row.subtasks) },
      { name: "Last checkpoint of the task", n: true, cell: (row) => bytes(row.operator.subtasks.reduce((sum, one) => sum + (one["task-checkpoint-size"] ?? 0), 0)) },
      { name: "Backend", cell: (row) => row.operator.backend },
    ], rows, { keyOf: (row) => `${row.operator.operator} ${row.name}`, chosen: (row) => row === chosen, empty: operators.length ? "No state is kept yet." : "No operator of this job keeps keyed state." })),
    chosen && lookUp(job, chosen, page),
  ];
}

function names(operator) {
  return [...new Set(operator.subtasks.flatMap((one) => (one.states ?? []).map((state) => state.name)))];
}

function ofName(operator, name) {
  return operator.subtasks.map((one) => ({ subtask: one.subtask, state: one.states?.find((state) => state.name === name) ?? null }));
}

function keys(subtasks) {
  const known = subtasks.filter((one) => one.state !== null);
  if (!known.length) return nothing;
  const more = known.some((one) => one.state.more) || known.length < subtasks.length;
  return `${count(known.reduce((sum, one) => sum + one.state.keys, 0))}${more ? "+" : ""}`;
}

function spread(subtasks) {
  const most = Math.max(1, ...subtasks.map((one) => one.state?.keys ?? 0));
  return h("div", { class: "spread" }, subtasks.map((one) => h("span", { key: one.subtask },
    meter(one.state === null ? null : one.state.keys / most, `Subtask ${one.subtask}: ${one.state === null ? "not known" : count(one.state.keys)} keys, of the fullest`, { warnFrom: 2 }),
    h("small", { class: "quiet" }, one.state === null ? nothing : count(one.state.keys)))));
}

function lookUp(job, row, page) {
  const place = `aioflow/jobs/${job.id}/state/${encodeURIComponent(row.operator.operator)}/${encodeURIComponent(row.name)}`;
  if (seen.place !== place) seen = { place, answer: null, error: null, key: "" };
  const ask = async (query) => {
    try {
      seen.answer = await get(place + query);
      seen.error = null;
    } catch (error) {
      seen.error = error;
      if (error.status === 403 || error.status === 401) withToken("State is shown to who knows the token", "Show", () => ask(query));
    }
    page.redraw();
  };
  return panel(`${row.operator.name}: ${row.name}`, null,
    h("form", {
      class: "body choices", onsubmit: (event) => {
        event.preventDefault();
        ask(seen.key === "" ? "" : `?key=${encodeURIComponent(seen.key)}`);
      },
    },
      h("label", null, "Key ", h("input", { type: "text", value: "", placeholder: "text, or JSON: 42, \"42\", [1, 2]", oninput: (event) => { seen.key = event.target.value; } })),
      h("button", null, "Look up"), h("button", { type: "button", onclick: () => ask("") }, "Show some")),
    seen.error && h("p", { class: "body text-bad" }, seen.error.message),
    answer(seen.answer));
}

function answer(found) {
  if (found === null) return null;
  if (found.items) {
    return table("Some of the keys", [
      { name: "Key", class: "name mono", cell: (one) => one.key }, { name: "Value", class: "mono", cell: (one) => one.value },
    ], found.items, { keyOf: (one) => one.key, empty: "There is nothing in it." });
  }
  return h("p", { class: "body" }, h("code", null, found.key), found.found ? [" holds ", h("code", null, found.value)] : " holds nothing",
    h("span", { class: "quiet" }, `, in subtask ${found.subtask}`));
}
