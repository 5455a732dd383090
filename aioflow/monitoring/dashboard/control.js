// Calls that change something: allowed only where the process says so, asked for twice, with a token that the page forgets when it is closed.

import { h, render } from "./dom.js";
import { change, get, useToken } from "./store.js";

const POLL_MS = 500;
const notice = () => document.getElementById("notice");
let fading = 0;
let kept = "";

export const mayChange = (store) => store.value("config")?.features?.["web-cancel"] === true;

/** Say something at the edge of the page, for a while. */
export function say(text) {
  render(notice(), h("p", null, text));
  clearTimeout(fading);
  fading = setTimeout(() => render(notice()), 9000);
}

/** Ask whether it is meant, and for the token; then call, and say what came of it. */
export function ask(question, method, path, body) {
  withToken(question, "Yes", () => carryOut(method, path, body));
}

/** Ask for the parallelism and the token; then let the job go on with it. */
export function askParallelism(job) {
  const wanted = { value: String(Math.max(...job.tasks.map((task) => task.parallelism))) };
  const field = h("p", null, h("label", { for: "parallelism" }, "Parallelism"), h("input", {
    id: "parallelism", type: "number", min: 1, required: true, value: wanted.value, oninput: (event) => { wanted.value = event.target.value; },
  }));
  withToken(`Rescale ${job.name}?`, "Rescale", () => carryOut("PATCH", `jobs/${job.id}/rescaling?parallelism=${encodeURIComponent(wanted.value)}`), field);
}

/** Ask for the token of the endpoint, then do it. */
export function withToken(question, yes, then, more = null) {
  const dialog = document.createElement("dialog");
  const field = { value: kept };
  const close = () => {
    dialog.close();
    dialog.remove();
  };
  render(dialog, h("form", {
    method: "dialog",
    onsubmit: (event) => {
      event.preventDefault();
      kept = field.value;
      useToken(kept);
      close();
      then();
    },
  },
    h("h2", null, question),
    more,
    h("p", null, h("label", { for: "token" }, "Token of this endpoint"), h("input", {
      id: "token", type: "password", autocomplete: "off", required: true, value: kept, oninput: (event) => { field.value = event.target.value; },
    })),
    h("p", { class: "choice" }, h("button", { type: "button", onclick: close }, "No"), h("button", { class: "main" }, yes))));
  dialog.addEventListener("cancel", () => dialog.remove());
  dialog.setAttribute("aria-label", question);
  document.body.append(dialog);
  dialog.showModal();
}

async function carryOut(method, path, body) {
  try {
    const answer = await change(method, path, body);
    const id = answer?.["request-id"];
    if (!id) {
      say("Done.");
      return;
    }
    say("Under way …");
    const place = path.replace(/[/]stop$/, "/savepoints").replace(/[?].*$/, "");
    for (;;) {
      const found = await get(`${place}/${id}`);
      if (found.status.id === "COMPLETED") {
        say(outcome(found.operation));
        return;
      }
      await new Promise((resolve) => { setTimeout(resolve, POLL_MS); });
    }
  } catch (error) {
    if (error.status === 401 || error.status === 403) kept = "";
    say(`Refused: ${error.message}`);
  }
}

function outcome(operation) {
  const cause = operation?.["failure-cause"];
  if (cause) return `Failed: ${String(cause["stack-trace"] ?? cause.class).trim().split("\n").at(-1)}`;
  return operation?.location ? `Written to ${operation.location}` : "Done.";
}
