// Line charts of the last ten minutes, drawn as SVG; the pointer shows the values of a moment.

import { h, s } from "./dom.js";

const WIDTH = 400;
const HEIGHT = 132;
const LEFT = 54;
const RIGHT = 6;
const TOP = 8;
const BOTTOM = 18;
export const COLORS = 8;

const COLUMNS = 120; // A point for each second would be noise at this width: what is drawn are means.

/**
 * lines: [{name, points: [[ms, value or null]]}], ascending. `format` makes text of a value; `from` and `to` are the ends of the time
 * axis; `max` pins the top of the value axis. `moment` makes text of a time.
 */
export function chart(label, lines, { from, to, format, moment, max = null, at = null, onAt = null }) {
  const values = lines.flatMap((line) => calmed(line.points, from, to).map((point) => point[1])).filter((value) => value !== null);
  const top = max ?? nice(Math.max(0, ...values));
  const bottom = Math.min(0, ...values) < 0 ? -nice(-Math.min(...values)) : 0;
  const x = (ms) => LEFT + ((ms - from) / (to - from)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - bottom) / (top - bottom || 1)) * (HEIGHT - TOP - BOTTOM);
  const minutes = Math.max(1, Math.round((to - from) / 60_000));
  const near = at === null ? null : lines.map((line) => nearest(line.points, at));
  const spoken = lines.map((line, index) => `${line.name}: ${text(shown(line, near?.[index]), format)}`).join("; ");
  return h("figure", { class: "chart" },
    s("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${label}. ${spoken || "no values yet"}`,
      onpointermove: (event) => onAt?.(momentUnder(event, from, to)),
      onpointerleave: () => onAt?.(null),
    },
      [bottom, (bottom + top) / 2, top].map((value) => [
        s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
        s("text", { class: "axis", x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, format(value))]),
      s("text", { class: "axis", x: LEFT, y: HEIGHT - 4 }, `−${minutes} min`),
      s("text", { class: "axis", x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, at === null ? "now" : moment(at)),
      lines.map((line, index) => s("path", { class: `line l${(index % COLORS) + 1}`, d: trace(calmed(line.points, from, to), from, x, y) })),
      at !== null && s("line", { class: "cursor", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }),
      near?.map((point, index) => point && point[1] !== null
        && s("circle", { class: `dot f${(index % COLORS) + 1}`, cx: x(point[0]), cy: y(point[1]), r: 3 }))),
    h("figcaption", { class: "chart-legend" }, lines.map((line, index) => h("span", { title: line.name },
      h("i", { class: `swatch f${(index % COLORS) + 1}` }), h("span", { class: "label" }, line.name),
      h("b", null, text(shown(line, near?.[index]), format))))));
}

function shown(line, near) {
  return near === undefined ? line.points.at(-1) : near;
}

function text(point, format) {
  return format(point ? point[1] : null);
}

function momentUnder(event, from, to) {
  const box = event.currentTarget.getBoundingClientRect();
  const across = ((event.clientX - box.left) / box.width) * WIDTH;
  const share = (across - LEFT) / (WIDTH - LEFT - RIGHT);
  return share < 0 || share > 1 ? null : from + share * (to - from);
}

function nearest(points, at) {
  let best = null;
  for (const point of points) {
    if (best === null || Math.abs(point[0] - at) < Math.abs(best[0] - at)) best = point;
  }
  return best;
}

/** The mean of each column of the drawing; null where all of it is not known. */
function calmed(points, from, to) {
  const step = (to - from) / COLUMNS;
  const columns = new Map();
  for (const [ms, value] of points) {
    const column = Math.floor(ms / step);
    const known = columns.get(column) ?? { sum: 0, count: 0 };
    if (value !== null) {
      known.sum += value;
      known.count += 1;
    }
    columns.set(column, known);
  }
  return [...columns].map(([column, { sum, count }]) => [Math.min(to, (column + 0.5) * step), count ? sum / count : null]);
}

/** A gap in the values is a gap in the line: the values there are not known. */
function trace(points, from, x, y) {
  let path = "";
  let drawing = false;
  for (const [ms, value] of points) {
    if (value === null || ms < from) {
      drawing = false;
      continue;
    }
    path += `${drawing ? "L" : "M"}${x(ms).toFixed(1)} ${y(value).toFixed(1)}`;
    drawing = true;
  }
  return path;
}

/** The next round number: 1, 2, 2.5 or 5 times a power of ten. */
function nice(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * unit >= value * 0.999) * unit;
}
