// What only an asyncio engine can show: how late its loop is and who holds it, which tasks wait for what, which async calls are in flight.

import { h } from "./dom.js";
import { count, duration, moment } from "./format.js";
import { figures, meter, missing, panel, table } from "./parts.js";
import { about, chooser, processes, wantedProcesses } from "./process.js";

const path = () => about("aioflow/asyncio");

export const wanted = () => ({ ...wantedProcesses, [path()]: 2000 });

let filter = "";

export function view(store, route, page) {
  const found = store.value(path());
  const all = processes(store, page);
  if (!found) return [h("div", { class: "headline" }, h("h1", null, "Event loop"), h("div", { class: "end" }, chooser(store, page))), missing(store, path(), "event loop"), all];
  const lag = found["lag-ms"];
  const slow = found["slow-callbacks"];
  const late = (ms) => h("span", { class: ms >= 100 ? "text-busy" : null }, duration(ms));
  return [
    h("div", { class: "headline" }, h("h1", null, "Event loop"), h("span", { class: "quiet" }, `${found.loop}${found.debug ? ", in debug mode" : ""}`),
      h("div", { class: "end" }, chooser(store, page), h("a", { href: "#/flame" }, "Flame graph of the loop"))),
    figures([
      ["Late now", late(lag.last)], ["Late, median", late(lag.p50), "of the last minute"], ["Late, p99", late(lag.p99)], ["Late, at most", late(lag.max)],
      ["Tasks", count(found["task-count"])], ["Calls in flight", count(found["async-calls"].reduce((sum, one) => sum + one["in-flight"], 0))],
      ["Slow callbacks", h("span", { class: slow.length ? "text-busy" : null }, count(slow.reduce((sum, one) => sum + one.count, 0)))],
    ]),
    all,
    h("div", { class: "columns" },
      panel("Who holds the loop", null, table("Slow callbacks", [
        { name: "Operator", class: "name", cell: (one) => place(one) },
        { name: "Times", n: true, cell: (one) => count(one.count) },
        { name: "Longest", n: true, cell: (one) => duration(one["slowest-ms"]) },
      ], slow, { keyOf: key, empty: "No operator has held the loop for more than 100 ms." })),
      panel("Async calls in flight", null, table("Async calls in flight", [
        { name: "Operator", class: "name", cell: (one) => place(one) },
        { name: "In flight", n: true, cell: (one) => `${count(one["in-flight"])} of ${count(one.capacity)}` },
        { name: "", cell: (one) => meter(one.capacity ? one["in-flight"] / one.capacity : null, "Capacity in use", { warnFrom: 1 }) },
      ], found["async-calls"], { keyOf: key, empty: "No operator awaits calls." }))),
    holds(found),
    tasks(found, page),
  ];
}

/** The last times in which code held the loop, with its stack. Processor time far below the length means that it waited without `await`. */
function holds(found) {
  const seen = new Map();
  const rows = found.holds.map((one) => {
    const number = (seen.get(one.time) ?? 0) + 1;
    seen.set(one.time, number);
    return { ...one, key: `${one.time} ${number}` };
  });
  const other = found["late-unexplained"];
  return panel("Held the loop", { note: other ? `late ${count(other)} times more, for want of a processor or by the engine` : null }, table("Held the loop", [
    { name: "When", cell: (one) => moment(one.time) },
    { name: "Operator", class: "name", cell: (one) => (one.operator ? [one.operator, h("span", { class: "quiet" }, ` subtask ${one.subtask} of ${one.job}`)] : `outside of all operators, ${one.task || "a callback"}`) },
    { name: "Held", n: true, cell: (one) => duration(one.ms) },
    { name: "Processor", n: true, cell: (one) => duration(one["cpu-ms"]) },
    { name: "In", class: "wide", cell: (one) => stack(one.stack) },
  ], rows, { keyOf: (one) => one.key, empty: "No code has held the loop for more than 100 ms." }));
}

function key(one) {
  return `${one["job-id"]} ${one["vertex-id"]} ${one.subtask} ${one.operator}`;
}

function place(one) {
  return [h("a", { class: "inline", href: `#/jobs/${one["job-id"]}/graph/${one["vertex-id"]}` }, one.operator), h("span", { class: "quiet" }, ` subtask ${one.subtask}`)];
}

function tasks(found, page) {
  const shown = found.tasks.filter((one) => filter === "" || `${one.name}\n${one.stack.join("\n")}`.toLowerCase().includes(filter.toLowerCase()));
  // Several tasks may have one name: each keeps its own place among those.
  const seen = new Map();
  const rows = shown.map((one) => {
    const number = (seen.get(one.name) ?? 0) + 1;
    seen.set(one.name, number);
    return { ...one, key: `${one.name} ${number}` };
  });
  return panel("Tasks and what they wait for", {
    note: shown.length === found.tasks.length ? null : `${shown.length} of ${found.tasks.length}`,
    end: h("label", null, h("span", { class: "hidden" }, "Only those with"), h("input", {
      type: "search", placeholder: "Filter", value: "", oninput: (event) => {
        filter = event.target.value;
        page.redraw();
      },
    })),
  }, table("Tasks of the loop", [
    { name: "Task", class: "name", cell: (one) => one.name },
    { name: "State", cell: (one) => one.state },
    { name: "Waits in", class: "wide", cell: (one) => stack(one.stack) },
  ], rows, { keyOf: (one) => one.key, empty: "No task is like that." }));
}

/** Where the task is, in one line; the way there on demand. */
function stack(places) {
  if (places.length < 2) return h("span", { class: "mono" }, places[0] ?? "");
  const inner = places.at(-1).startsWith("waits for") ? places.at(-2) : places.at(-1);
  return h("details", null, h("summary", { class: "mono" }, inner),
    h("ul", { class: "stack" }, places.map((one) => h("li", null, one))));
}
