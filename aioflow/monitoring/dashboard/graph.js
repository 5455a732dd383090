// The drawing of a job: a box for each task, coloured by how it spends its time; edges with their rate and how full their queues are.

import { s } from "./dom.js";
import { bytes, duration, isInstant, percent, rate, watermark } from "./format.js";
import { layout } from "./layout.js";

const WIDTH = 216;
const SECOND_LINE = 15;
const COLUMNS_MAX = 12;
const PAD = 12;
const BUSY_FROM = 0.8;
const PRESSED_FROM = 0.5;
const FULL_FROM = 0.9;

/** How a task stands, in one word; the class of its box follows it. */
export function standing(task) {
  if (task.status === "FAILED" || task.status === "FAILING") return "failed";
  if (task.status === "FINISHED" || task.status === "CANCELED") return "done";
  if ((task.pressed ?? 0) >= PRESSED_FROM) return "pressed";
  if ((task.busy ?? 0) >= BUSY_FROM) return "busy";
  return "calm";
}

/** `room` is the width in pixels that there is: a wide page has producers left, a narrow one above. */
export function drawing(job, { room, chosen, hrefOf }) {
  const across = room >= 900 || (room >= 640 && depth(job) <= 2);
  const gap = across ? 30 : 24;
  // Boxes are as high as the names need: a second line only where one is a chain.
  const extra = job.tasks.some((task) => lines(task.name)[1]) ? SECOND_LINE : 0;
  const size = { width: WIDTH, height: 82 + extra, extra };
  const found = layout(job.tasks, job.edges, { ...size, gap, layerGap: across ? 104 : 62, across });
  const margin = 6;
  const width = found.width + 2 * margin;
  const height = found.height + 2 * margin;
  // A deep job is made smaller, but stays legible: then it scrolls inside its panel.
  const scale = Math.min(1.12, Math.max(room / width, across ? 0.72 : 0.62));
  return s("svg", {
    viewBox: `${-margin} ${-margin} ${width} ${height}`, width: Math.floor(width * scale), height: Math.floor(height * scale),
    role: "group", "aria-label": `Graph of ${job.name}: ${job.tasks.length} tasks`,
  },
    job.edges.map((edge, index) => path(edge, found.routes[index], across)),
    job.tasks.map((task) => box(task, found.at.get(task.id), size, job.now, task.id === chosen, hrefOf(task))),
    job.edges.map((edge, index) => label(edge, found.routes[index])));
}

function depth(job) {
  const sources = new Set(job.edges.map((edge) => edge.source));
  return job.tasks.filter((task) => sources.has(task.id)).length;
}

function path(edge, points, across) {
  const parts = [];
  for (let i = 1; i < points.length; i++) {
    const [x, y] = points[i - 1];
    const [toX, toY] = points[i];
    if (i === 1) parts.push(`M${x} ${y}`);
    const straight = across ? i % 2 === 0 : i % 2 === 0;
    if (straight) parts.push(`L${toX} ${toY}`);
    else if (across) parts.push(`C${(x + toX) / 2} ${y} ${(x + toX) / 2} ${toY} ${toX} ${toY}`);
    else parts.push(`C${x} ${(y + toY) / 2} ${toX} ${(y + toY) / 2} ${toX} ${toY}`);
  }
  const full = (edge.fill ?? 0) >= FULL_FROM;
  const flows = (edge.rate ?? 0) > 0;
  const thick = flows ? Math.min(7, 1.4 + Math.log10(1 + edge.rate) * 0.8) : 1.4;
  const [x, y] = points.at(-1);
  const tip = across ? `M${x} ${y}l-8 -5v10z` : `M${x} ${y}l-5 -8h10z`;
  return s("g", { key: `${edge.source}>${edge.target}>${edge.index}`, "aria-hidden": "true" },
    s("path", { class: `edge ${flows ? "flows" : ""} ${full ? "full" : ""}`, d: parts.join(""), "stroke-width": thick.toFixed(1) }),
    s("path", { class: `tip ${full ? "full" : ""}`, d: tip }));
}

function label(edge, points) {
  const [x, y] = points.at(-2);
  const [toX, toY] = points.at(-1);
  const text = edge.rate === null ? "" : rate(edge.rate);
  const size = edge.byteRate ? `${bytes(edge.byteRate)}/s` : "";
  const full = (edge.fill ?? 0) >= FULL_FROM;
  if (!text && edge.fill === null) return null;
  const width = Math.max(40, text.length * 6.2 + 14, size.length * 5.4 + 12);
  const top = size ? 12 : 0;
  const height = top + (edge.fill === null ? 17 : 23);
  const fill = Math.min(1, Math.max(0, edge.fill ?? 0));
  return s("g", {
    key: `label ${edge.source}>${edge.target}>${edge.index}`, class: `edge-label ${full ? "full" : ""}`,
    transform: `translate(${((x + toX) / 2 - width / 2 - 3).toFixed(1)} ${((y + toY) / 2 - height / 2).toFixed(1)})`,
  },
    s("title", null, edge.about),
    s("rect", { width, height, rx: 5 }),
    s("text", { x: width / 2, y: 12.5 }, text),
    size && s("text", { class: "size", x: width / 2, y: 24 }, size),
    edge.fill !== null && [
      s("rect", { class: "room", x: 6, y: top + 16, width: width - 12, height: 3, rx: 1.5 }),
      s("rect", { class: "fill", x: 6, y: top + 16, width: ((width - 12) * fill).toFixed(1), height: 3, rx: 1.5 })]);
}

function box(task, at, size, now, chosen, href) {
  const how = standing(task);
  const right = WIDTH - PAD;
  const [first, second] = lines(task.name);
  const bar = WIDTH - 2 * PAD;
  const known = task.busy !== null;
  const busy = Math.max(0, Math.min(1, task.busy ?? 0)) * bar;
  const pressed = Math.max(0, Math.min(1, task.pressed ?? 0)) * bar;
  const about = `${task.name}, ${task.parallelism} ${task.parallelism === 1 ? "subtask" : "subtasks"}, ${task.status.toLowerCase()}`;
  const spent = known ? `busy ${percent(task.busy)}, back-pressured ${percent(task.pressed)}, idle ${percent(task.idle)}` : "times not known";
  return s("a", {
    key: task.id, class: `node is-${how} ${chosen ? "chosen" : ""}`, href, transform: `translate(${at.x} ${at.y})`,
    "aria-label": `${about}, ${spent}`, "aria-current": chosen ? "true" : null,
  },
    s("title", null, `${about}\n${spent}`),
    s("rect", { class: "box", width: WIDTH, height: size.height, rx: 8 }),
    s("text", { class: "title", x: PAD, y: 20 }, first),
    s("text", { class: "small", x: right, y: 20, "text-anchor": "end" }, `×${task.parallelism}`),
    columns(task, right - 10 - 6.2 * String(task.parallelism).length),
    second && s("text", { class: "small", x: PAD, y: 36 }, second),
    s("rect", { class: "bar-idle", x: PAD, y: 31 + size.extra, width: bar, height: 6, rx: 3, opacity: known ? 1 : 0.4 }),
    known && s("rect", { class: "bar-busy", x: PAD, y: 31 + size.extra, width: busy.toFixed(1), height: 6, rx: 3 }),
    known && s("rect", { class: "bar-pressed", x: (PAD + busy).toFixed(1), y: 31 + size.extra, width: pressed.toFixed(1), height: 6, rx: 3 }),
    s("text", { class: word(how), x: PAD, y: 54 + size.extra }, words(task, how)),
    s("text", { x: right, y: 54 + size.extra, "text-anchor": "end" }, flow(task)),
    s("text", { class: "small", x: PAD, y: 72 + size.extra }, event(task, now)),
    s("text", { class: "small", x: right, y: 72 + size.extra, "text-anchor": "end" }, lag(task)));
}

/** A column for each subtask, as high as its share of the records: skew is seen before it is read. */
function columns(task, right) {
  const values = task.subtasks.map((one) => (task.isSource ? one.outRate : one.inRate) ?? 0);
  const most = Math.max(...values);
  if (values.length < 2 || values.length > COLUMNS_MAX || most <= 0) return null;
  const left = right - values.length * 5;
  return s("g", { class: "columns-of" },
    s("title", null, `Records of each subtask: ${values.map((value) => rate(value)).join(", ")}`),
    values.map((value, index) => {
      const height = Math.max(1.5, (value / most) * 11);
      return s("rect", { x: (left + index * 5).toFixed(1), y: (20 - height).toFixed(1), width: 3.4, height: height.toFixed(1), rx: 1 });
    }));
}

function word(how) {
  return { busy: "busy-value", pressed: "pressed-value", failed: "bad-value" }[how] ?? "small";
}

function words(task, how) {
  if (how === "failed" || how === "done" || task.status !== "RUNNING") return task.status.toLowerCase();
  if (task.busy === null) return "–";
  if (how === "pressed") return `back-pressured ${percent(task.pressed)}`;
  return `busy ${percent(task.busy)}`;
}

function flow(task) {
  const value = task.isSource ? task.outRate : task.inRate;
  return value === null ? "" : rate(value);
}

function event(task, now) {
  const text = watermark(task.watermark, now);
  return text === "–" ? "no watermark" : text === "end" ? "event time is over" : text;
}

function lag(task) {
  return isInstant(task.watermark) && task.lag !== null && task.lag < 86_400_000 ? `−${duration(Math.max(0, task.lag))}` : "";
}

/** The name of a chain over two lines, at an arrow if there is one. */
function lines(name) {
  const room = [21, 34];
  if (name.length <= room[0]) return [name.replaceAll(" -> ", " → "), ""];
  const parts = name.split(" -> ");
  let first = parts.shift();
  while (parts.length && first.length + parts[0].length + 3 <= room[0]) first += ` → ${parts.shift()}`;
  return [clipped(first, room[0]), clipped(parts.length ? `→ ${parts.join(" → ")}` : "", room[1])];
}

export function clipped(text, length) {
  return text.length <= length ? text : `${text.slice(0, length - 1)}…`;
}
