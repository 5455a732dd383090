// Places the tasks of a job: producers first, consumers after, few crossings. Drawn by graph.js.
//
// Layered, as `aioflow graph --svg` draws: a task stands one layer behind its farthest producer; an edge that passes layers has a
// place of its own in each. Within a layer, places follow the mean position of their neighbours (Sugiyama's barycentre).

const SWEEPS = 6;

/**
 * nodes: [{id}], edges: [{source, target}], size: {width, height} of a node, across: whether layers go to the right (else down).
 * Returns {width, height, at: Map(id -> {x, y}), routes: [points per edge]}; a route is a list of [x, y] along layers.
 */
export function layout(nodes, edges, { width, height, gap, layerGap, across }) {
  const layerOf = layersOf(nodes, edges);
  const places = new Map(nodes.map((node) => [node.id, place(node.id, layerOf.get(node.id))]));
  const all = [...places.values()];
  const routes = edges.map((edge) => {
    const start = places.get(edge.source);
    const end = places.get(edge.target);
    const passing = [];
    for (let layer = start.layer + 1; layer < end.layer; layer++) passing.push(place(null, layer));
    all.push(...passing);
    const route = [start, ...passing, end];
    for (let i = 1; i < route.length; i++) {
      route[i - 1].after.push(route[i]);
      route[i].before.push(route[i - 1]);
    }
    return route;
  });
  const layers = [];
  for (const one of all) (layers[one.layer] ??= []).push(one);
  order(layers);
  return arrange(layers, routes, places, { width, height, gap, layerGap, across });
}

function place(id, layer) {
  return { id, layer, before: [], after: [], index: 0, middle: 0 };
}

function layersOf(nodes, edges) {
  const layerOf = new Map(nodes.map((node) => [node.id, 0]));
  // As many rounds as there are tasks: an engine's graph has no cycle, and what a broken answer says must not hang the page.
  for (let round = 0; round < nodes.length; round++) {
    let moved = false;
    for (const { source, target } of edges) {
      if (layerOf.get(target) <= layerOf.get(source) && layerOf.get(source) + 1 < nodes.length) {
        layerOf.set(target, layerOf.get(source) + 1);
        moved = true;
      }
    }
    if (!moved) break;
  }
  const fed = new Set(edges.map((edge) => edge.target));
  for (const node of nodes) {
    const readers = edges.filter((edge) => edge.source === node.id).map((edge) => layerOf.get(edge.target));
    if (!fed.has(node.id) && readers.length) layerOf.set(node.id, Math.min(...readers) - 1); // A source stands beside its first reader.
  }
  return layerOf;
}

function order(layers) {
  const number = () => layers.forEach((layer) => layer.forEach((one, index) => { one.index = index; }));
  number();
  let best = layers.map((layer) => [...layer]);
  let fewest = crossings(layers);
  for (let sweep = 0; sweep < 2 * SWEEPS && fewest > 0; sweep++) {
    const backwards = sweep % 2 === 1;
    for (const layer of backwards ? [...layers].reverse() : layers) {
      const mean = new Map(layer.map((one) => {
        const near = backwards ? one.after : one.before;
        return [one, near.length ? near.reduce((sum, other) => sum + other.index, 0) / near.length : one.index];
      }));
      layer.sort((a, b) => mean.get(a) - mean.get(b));
      layer.forEach((one, index) => { one.index = index; });
    }
    const found = crossings(layers);
    if (found < fewest) {
      fewest = found;
      best = layers.map((layer) => [...layer]);
    }
  }
  best.forEach((layer, index) => { layers[index] = layer; });
  number();
}

function crossings(layers) {
  let found = 0;
  for (const layer of layers) {
    const arrows = layer.flatMap((one) => one.after.map((other) => [one.index, other.index]));
    for (let i = 0; i < arrows.length; i++) {
      for (let j = 0; j < i; j++) {
        if ((arrows[i][0] - arrows[j][0]) * (arrows[i][1] - arrows[j][1]) < 0) found++;
      }
    }
  }
  return found;
}

function arrange(layers, routes, places, { width, height, gap, layerGap, across }) {
  const [along, beside] = across ? [width, height] : [height, width];
  const lane = 22; // How much of a layer an edge needs that only passes it.
  const sizeOf = (one) => (one.id === null ? lane : beside);
  const extent = (layer) => layer.reduce((sum, one) => sum + sizeOf(one) + gap, -gap);
  const widest = Math.max(0, ...layers.map(extent));
  for (const layer of layers) {
    let position = (widest - extent(layer)) / 2;
    for (const one of layer) {
      one.middle = position + sizeOf(one) / 2;
      position += sizeOf(one) + gap;
    }
  }
  // A place straight behind its only neighbour makes a straight edge: move whole layers' members there where there is room.
  for (let round = 0; round < 4; round++) {
    for (const layer of round % 2 ? [...layers].reverse() : layers) {
      layer.forEach((one, index) => {
        const near = round % 2 ? one.after : one.before;
        if (!near.length) return;
        const wanted = near.reduce((sum, other) => sum + other.middle, 0) / near.length;
        const before = layer[index - 1];
        const after = layer[index + 1];
        const low = before ? before.middle + (sizeOf(before) + sizeOf(one)) / 2 + gap : sizeOf(one) / 2;
        const high = after ? after.middle - (sizeOf(after) + sizeOf(one)) / 2 - gap : widest - sizeOf(one) / 2;
        one.middle = Math.min(Math.max(wanted, low), Math.max(low, high));
      });
    }
  }
  const step = along + layerGap;
  const at = new Map();
  for (const [id, one] of places) {
    const point = [one.layer * step, one.middle - beside / 2];
    at.set(id, across ? { x: point[0], y: point[1] } : { x: point[1], y: point[0] });
  }
  const lines = routes.map((route) => route.flatMap((one, index) => {
    const start = one.layer * step;
    const middle = one.middle + (one.id === null ? 0 : spread(route, index, beside));
    const points = [];
    if (index > 0) points.push([start, middle]);
    if (index < route.length - 1) points.push([start + along, middle]);
    return across ? points : points.map(([x, y]) => [y, x]);
  }));
  const length = layers.length * step - layerGap;
  return { width: across ? length : widest, height: across ? widest : length, at, routes: lines };
}

/** Several edges share a side of a node: each has a point of its own. */
function spread(route, index, beside) {
  const one = route[index];
  const [others, mine] = index === 0 ? [one.after, route[1]] : [one.before, route[index - 1]];
  const sorted = [...others].sort((a, b) => a.middle - b.middle);
  const room = Math.min(beside * 0.6, 24 * (sorted.length - 1));
  return sorted.length < 2 ? 0 : room * (sorted.indexOf(mine) / (sorted.length - 1) - 0.5);
}
