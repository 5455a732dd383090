// A flame graph: what the loop, or the subtasks of one task, spend their time on; wide is often, below is called by above.

import { h, s } from "./dom.js";
import { count, percent } from "./format.js";
import { clipped } from "./graph.js";
import { panel } from "./parts.js";
import { about, chooser, wantedProcesses } from "./process.js";
import { get } from "./store.js";

const ROW = 19;
const CHARACTER = 6.7;
const SECONDS = 2;
const KINDS = [["on_cpu", "running"], ["full", "running and waiting"], ["off_cpu", "waiting"]];

export const wanted = () => ({});

let taken = { place: null, data: null, error: null, busy: false, zoom: [], match: "", kind: "on_cpu" };

/** Of one task of a job. */
export function view(store, route, job, page) {
  const task = job.byId.get(route.rest[0]);
  const place = task ? `jobs/${job.id}/vertices/${task.id}/flamegraph?type=${taken.kind}&seconds=${SECONDS}` : `aioflow/flamegraph?seconds=${SECONDS}`;
  return flame(place, task ? task.name : "The loop", page, task);
}

/** Of the whole loop. */
export const loop = {
  wanted: () => wantedProcesses,
  view: (store, route, page) => [
    h("div", { class: "headline" }, h("h1", null, "Flame graph"), h("div", { class: "end" }, chooser(store, page))),
    flame(about(`aioflow/flamegraph?seconds=${SECONDS}`), "The loop", page, null),
  ],
};

function flame(place, title, page, task) {
  if (taken.place !== place) {
    taken = { ...taken, place, data: null, error: null, busy: false, zoom: [] };
    take(page);
  }
  const root = taken.data && trimmed(taken.data);
  return panel(title, {
    note: root ? `${count(root.value)} looks in ${SECONDS} s` : null,
    end: [
      task && h("label", null, h("span", { class: "hidden" }, "What is shown"), h("select", {
        onchange: (event) => {
          taken = { ...taken, kind: event.target.value };
          page.redraw();
        },
      }, KINDS.map(([kind, label]) => h("option", { value: kind, selected: kind === taken.kind }, label)))),
      h("label", null, h("span", { class: "hidden" }, "Mark functions with"), h("input", {
        type: "search", placeholder: "Mark", value: "", oninput: (event) => {
          taken.match = event.target.value;
          page.redraw();
        },
      })),
      h("button", { onclick: () => take(page), disabled: taken.busy }, taken.busy ? "Looking …" : "Look again"),
    ],
  }, h("div", { class: "body" },
    taken.error && h("p", { class: "text-bad" }, taken.error.message),
    !root ? h("p", { class: "empty" }, taken.error ? "" : `Looking for ${SECONDS} s …`)
      : root.value === 0 ? h("p", { class: "empty" }, "Nothing was running: an idle loop has no flames.") : picture(root, page)));
}

async function take(page) {
  const mine = taken;
  mine.busy = true;
  page.redraw();
  try {
    mine.data = (await get(mine.place)).data;
    mine.error = null;
  } catch (error) {
    mine.error = error;
  }
  mine.busy = false;
  if (taken === mine || taken.place === mine.place) {
    taken = { ...taken, data: mine.data, error: mine.error, busy: false, zoom: [] };
    page.redraw();
  }
}

/** Without the frames that all have in common at the top: how the program and its loop were started. */
function trimmed(root) {
  const plumbing = /\((asyncio|uvloop)\/|<module>|^(run|main|Runner\.run) /;
  const strip = (node) => {
    const children = node.children.flatMap((child) => (plumbing.test(child.name) ? strip(child).children : [strip(child)]));
    return { ...node, children: united(children) };
  };
  return strip(root);
}

function united(children) {
  const byName = new Map();
  for (const child of children) {
    const known = byName.get(child.name);
    if (known) {
      known.value += child.value;
      known.children = united([...known.children, ...child.children]);
    } else {
      byName.set(child.name, { ...child });
    }
  }
  return [...byName.values()].sort((a, b) => b.value - a.value);
}

function picture(root, page) {
  let top = root;
  const path = [root];
  for (const name of taken.zoom) {
    const next = top.children.find((child) => child.name === name);
    if (!next) break;
    top = next;
    path.push(top);
  }
  const width = Math.max(280, page.width - 30);
  const boxes = [];
  path.forEach((node, depth) => boxes.push({ node, depth, x: 0, width, names: path.slice(1, depth + 1).map((one) => one.name) }));
  const spread = (node, depth, x, names) => {
    let at = x;
    for (const child of node.children) {
      const wide = (child.value / top.value) * width;
      if (wide >= 1) {
        const mine = [...names, child.name];
        boxes.push({ node: child, depth, x: at, width: wide, names: mine });
        spread(child, depth + 1, at, mine);
      }
      at += wide;
    }
  };
  spread(top, path.length, 0, path.slice(1).map((one) => one.name));
  const height = (Math.max(...boxes.map((box) => box.depth)) + 1) * ROW;
  const zoom = (names) => {
    taken.zoom = names;
    page.redraw();
  };
  return h("div", { class: "flame", tabindex: "0", role: "region", "aria-label": "Flame graph" },
    s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": summary(root) },
      boxes.map(({ node, depth, x, width: wide, names }) => s("g", {
        key: names.join("\n") || "root", class: hue(node), transform: `translate(${x.toFixed(1)} ${depth * ROW})`, onclick: () => zoom(names),
      },
        s("title", null, `${node.name}\n${count(node.value)} looks, ${percent(node.value / root.value)}`),
        s("rect", { width: wide.toFixed(1), height: ROW - 1, rx: 2 }),
        wide > 30 && s("text", { x: 5, y: 13 }, clipped(depth === 0 ? "all" : node.name, Math.max(1, Math.floor((wide - 8) / CHARACTER))))))));
}

function hue(node) {
  if (taken.match && node.name.toLowerCase().includes(taken.match.toLowerCase())) return "match";
  let sum = 0;
  for (const character of node.name) sum = (sum * 31 + character.codePointAt(0)) % 1009;
  return `h${sum % 5}`;
}

function summary(root) {
  const parts = root.children.slice(0, 5).map((child) => `${child.name}: ${percent(child.value / root.value)}`);
  return `Flame graph of ${root.value} looks. ${parts.join("; ")}`;
}
