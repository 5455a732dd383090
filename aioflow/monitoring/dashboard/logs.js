// The last log records of the process.

import { h } from "./dom.js";
import { count, moment } from "./format.js";
import { missing, panel } from "./parts.js";
import { about, chooser, wantedProcesses } from "./process.js";

const LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR"];
const SHOWN = 500;

let level = "INFO";

const path = () => about(`aioflow/logs?level=${level}&limit=${SHOWN}`);

export const wanted = () => ({ ...wantedProcesses, [path()]: 2000 });

export function view(store, route, page) {
  const records = store.value(path())?.records;
  const choose = h("label", null, "At least ", h("select", {
    onchange: (event) => {
      level = event.target.value;
      page.redraw();
    },
  }, LEVELS.map((name) => h("option", { value: name, selected: name === level }, name.toLowerCase()))));
  return [
    h("div", { class: "headline" }, h("h1", null, "Log"), h("div", { class: "end" }, chooser(store, page))),
    panel("Newest first", { note: records ? `${count(records.length)} records` : null, end: choose },
      !records ? missing(store, path(), "log")
        : records.length ? h("div", { class: "log", tabindex: "0", role: "log", "aria-label": "Log records", "aria-live": "off" }, [...records].reverse().map(line))
          : h("p", { class: "empty" }, "Nothing has been logged at this level. The engine logs with logging, under the name aioflow.")),
  ];
}

function line(record) {
  return h("div", { key: record.number, class: record.level },
    h("span", { class: "quiet" }, `${moment(record.time)} `), `${record.level} `, h("span", { class: "quiet" }, `${record.logger.replace(/^aioflow\./, "")} `), record.message,
    record.stack && h("details", null, h("summary", null, "Traceback"), record.stack));
}
