/**
 * Places the boxes of a graph in layers, in a worker, in time linear in boxes and edges.
 *
 * Longest paths determine the layers, and neighbours determine the order within a layer. An edge
 * that crosses layers gets a bend in each, so that it runs between boxes. A layer with many boxes
 * is folded into several columns, so that a thousand parallel calls form a block rather than a
 * line.
 *
 * "Along" is the direction of edges, "across" the other one.
 */

import { sizeOf } from "./sizes.js";

const ORDER_SWEEPS = 8;
const ALIGN_SWEEPS = 6;
/** Maximum bends in a picture and of one edge; further edges are straight. */
const MAX_BENDS = 4_000;
const MAX_PASSED = 24;
const BEND_ROOM = 6;
const BOX_GAP = 16;
const COLUMN_GAP = 26;
const LAYER_GAP = 64;
/** Up to this many boxes a layer is one column; a larger one may be folded. */
const MIN_ROWS = 9;
/** Graphs with up to this many edges have room for labels between layers. */
const MAX_LABELLED = 60;
const CHARACTER = 5.6;
const LONGEST_LABEL = 150;
/** Gap between a group's members and other boxes, for the group's frame and name. */
const FRAME_GAP = 24;

addEventListener("message", ({ data: { boxes, edges, pane } }) => {
  postMessage(placeGraph(boxes, edges, pane));
});

/**
 * @typedef {object} Placed
 * @property {Map<string, {x: number, y: number}>} at upper left corners of boxes, by id
 * @property {Map<string, {x: number, y: number}[]>} bends of edges between their ends, by key
 * @property {{group: string, left: number, top: number, right: number, bottom: number}[]} frames
 * @property {boolean} runsDown edges run down, else to the right
 * @property {number} width
 * @property {number} height
 */

/**
 * Place boxes for a pane: to the right, or downwards in a high pane if that is more readable.
 *
 * @param {object[]} boxes with `id`, `kind` and `group`, in order of submission
 * @param {{key: string, from: string, to: string, label: string, isImplied: boolean}[]} edges
 *   implied ones get no room of their own
 * @param {{width: number, height: number}} pane
 * @returns {Placed}
 */
export function placeGraph(boxes, edges, pane) {
  const aspect = pane.width / Math.max(1, pane.height);
  const right = place(boxes, edges, aspect, false);
  if (aspect >= 0.8) return right;
  const down = place(boxes, edges, aspect, true);
  const scaleOf = ({ width, height }) => Math.min(aspect / width, 1 / height);
  return scaleOf(down) >= scaleOf(right) ? down : right;
}

function place(boxes, edges, aspect, runsDown) {
  const items = boxes.map((box, number) => {
    const { width, height } = sizeOf(box);
    const [along, across] = runsDown ? [height, width] : [width, height];
    return { box, number, along, across, group: box.group ?? null, heads: [], tails: [], layer: 0 };
  });
  const numbers = new Map(boxes.map((box, index) => [box.id, index]));
  const joins = [];
  for (const edge of edges) {
    const [tail, head] = [numbers.get(edge.from), numbers.get(edge.to)];
    if (tail === undefined || head === undefined || tail === head) continue;
    joins.push({ edge, tail: items[tail], head: items[head], bends: [] });
  }
  const roomy = joins.filter(({ edge }) => !edge.isImplied);
  for (const { tail, head } of roomy) join(tail, head);
  const layers = inLayers(items);
  addBends(items, layers, roomy);
  order(layers);
  const rows = bestRows(layers, runsDown ? 1 / aspect : aspect);
  const folded = layers.map((layer) => layer.filter(isBox).length > rows);
  align(layers, folded, rows);
  const length = placeAlong(layers, folded, gapsAfter(layers, joins, runsDown));
  return picture(items, joins, length, runsDown);
}

const isBox = (item) => item.box !== null;

function join(tail, head) {
  tail.heads.push(head);
  head.tails.push(tail);
}

/** Assign layers by longest paths in Kahn's order; an unexpected cycle is cut where it is met. */
function inLayers(items) {
  const missing = new Map(items.map((item) => [item, item.tails.length]));
  const ready = items.filter((item) => !item.tails.length);
  const done = new Set();
  for (let next = 0; done.size < items.length; ) {
    if (next === ready.length) ready.push(items.find((item) => !done.has(item)));
    const item = ready[next++];
    if (done.has(item)) continue;
    done.add(item);
    for (const head of item.heads) {
      if (done.has(head)) continue;
      head.layer = Math.max(head.layer, item.layer + 1);
      missing.set(head, missing.get(head) - 1);
      if (missing.get(head) === 0) ready.push(head);
    }
  }
  // A box without predecessors goes right before its first reader.
  for (const item of items) {
    if (item.tails.length || !item.heads.length) continue;
    const first = item.heads.reduce((least, { layer }) => Math.min(least, layer), Infinity);
    item.layer = Math.max(0, first - 1);
  }
  const layers = [];
  for (const item of items) (layers[item.layer] ??= []).push(item);
  return Array.from(layers, (layer) => layer ?? []);
}

/** Add bends to edges that cross layers; bends are laid out like small boxes. */
function addBends(items, layers, joins) {
  for (const item of items) [item.heads, item.tails] = [[], []];
  let count = 0;
  for (const { tail, head, bends } of joins) {
    const passed = head.layer - tail.layer - 1;
    if (passed > 0 && passed <= MAX_PASSED && count + passed <= MAX_BENDS) {
      count += passed;
      for (let layer = tail.layer + 1; layer < head.layer; layer += 1) {
        const bend = { box: null, along: 0, across: BEND_ROOM, group: null, heads: [], tails: [], layer };
        layers[layer].push(bend);
        bends.push(bend);
      }
    }
    [tail, ...bends, head].reduce((one, other) => (join(one, other), other));
  }
}

/** Sort each layer by the mean position of its neighbours, forwards and backwards. */
function order(layers) {
  const note = (layer) => layer.forEach((item, index) => (item.place = index - layer.length / 2));
  layers.forEach(note);
  for (let sweep = 0; sweep < ORDER_SWEEPS; sweep += 1) {
    const side = sweep % 2 ? "heads" : "tails";
    for (const layer of sweep % 2 ? [...layers].reverse() : layers) {
      for (const item of layer) item.mean = mean(item[side], (each) => each.place) ?? item.place;
      layer.sort((a, b) => a.mean - b.mean);
      note(layer);
    }
  }
  for (const layer of layers) {
    orderAlikes(layer);
    keepGroupsTogether(layer);
  }
}

function mean(items, valueOf) {
  if (!items.length) return null;
  return items.reduce((sum, item) => sum + valueOf(item), 0) / items.length;
}

/** Keep boxes with equal neighbours in order of submission. */
function orderAlikes(layer) {
  const ids = new Map();
  const idOf = (item) => ids.get(item) ?? (ids.set(item, ids.size), ids.size - 1);
  const alike = new Map();
  layer.forEach((item, index) => {
    if (!isBox(item)) return;
    const key = `${item.tails.map(idOf).sort()} ${item.heads.map(idOf).sort()}`;
    if (!alike.has(key)) alike.set(key, []);
    alike.get(key).push(index);
  });
  for (const places of alike.values()) {
    const members = places.map((index) => layer[index]).sort((a, b) => a.number - b.number);
    places.forEach((index, number) => (layer[index] = members[number]));
  }
}

/** Place members of a task group next to each other, at the first one's place. */
function keepGroupsTogether(layer) {
  const first = new Map();
  layer.forEach(({ group }, index) => {
    if (group !== null && !first.has(group)) first.set(group, index);
  });
  if (!first.size) return;
  const rank = new Map(layer.map((item, index) => [item, first.get(item.group) ?? index]));
  layer.sort((a, b) => rank.get(a) - rank.get(b));
}

/**
 * Choose the number of rows that shows the whole picture at the largest scale; among nearly equal
 * ones the highest.
 */
function bestRows(layers, aspect) {
  const counts = layers.map((layer) => layer.filter(isBox).length);
  const widest = Math.max(1, ...counts);
  if (widest <= MIN_ROWS) return widest;
  const along = Math.max(...layers.flat().map((item) => item.along)) + COLUMN_GAP;
  const across = Math.max(...layers.flat().map((item) => item.across)) + BOX_GAP;
  let best = { rows: MIN_ROWS, scale: 0 };
  for (let rows = MIN_ROWS; rows <= widest; rows += Math.ceil(rows / 16)) {
    const columns = counts.reduce((sum, count) => sum + Math.ceil(count / rows), 0);
    const length = columns * along + layers.length * (LAYER_GAP - COLUMN_GAP);
    const scale = Math.min(aspect / length, 1 / (Math.min(rows, widest) * across));
    if (scale >= best.scale * 0.98) best = { rows, scale: Math.max(scale, best.scale) };
  }
  return best.rows;
}

/** Set positions across: columns are centred, then pulled towards their neighbours. */
function align(layers, folded, rows) {
  for (const item of layers.flat()) item.neighbours = [...item.tails, ...item.heads];
  layers.forEach((layer, number) => {
    if (folded[number]) fold(layer, rows);
    else stack(layer);
  });
  const most = layers.flat().reduce((far, { start, across }) => Math.max(far, -start, start + across), 0);
  for (let sweep = 0; sweep < ALIGN_SWEEPS; sweep += 1) {
    const numbers = [...layers.keys()];
    for (const number of sweep % 2 ? numbers.reverse() : numbers) {
      if (!folded[number]) draw(layers[number], most);
    }
  }
}

const centre = (item) => item.start + item.across / 2;

/** Minimum distance between the starts of two consecutive items. */
function distance(one, other) {
  if (!isBox(one) && !isBox(other)) return 2 * BEND_ROOM;
  return one.across + BOX_GAP + (one.group === other.group ? 0 : FRAME_GAP);
}

function stack(column) {
  let next = 0;
  column.forEach((item, index) => {
    item.start = next;
    next += index + 1 < column.length ? distance(item, column[index + 1]) : item.across;
  });
  for (const item of column) item.start -= next / 2;
}

/** Fold a layer into several columns; edges that cross it run above and below them. */
function fold(layer, rows) {
  const boxes = layer.filter(isBox);
  const perColumn = Math.ceil(boxes.length / Math.ceil(boxes.length / rows));
  let [top, bottom] = [0, 0];
  for (let first = 0; first < boxes.length; first += perColumn) {
    const column = boxes.slice(first, first + perColumn);
    stack(column);
    const number = first / perColumn;
    for (const item of column) {
      item.column = number;
      // Every other column is shifted by half a row, so that edges to it run between boxes of the
      // one before.
      if (number % 2) item.start += (item.across + BOX_GAP) / 2;
    }
    top = Math.min(top, column[0].start);
    bottom = Math.max(bottom, column.at(-1).start + column.at(-1).across);
  }
  const bends = layer.filter((item) => !isBox(item));
  const half = bends.length >> 1;
  bends.forEach((bend, index) => {
    const lane = BOX_GAP + 2 * BEND_ROOM * (index < half ? half - 1 - index : index - half);
    bend.start = index < half ? top - lane - BEND_ROOM : bottom + lane;
  });
}

/**
 * Move a column's items towards the means of their neighbours, keeping order and distances: least
 * squares, by pooling items that would come too close.
 */
function draw(column, most) {
  const pools = [];
  let offset = 0;
  column.forEach((item, index) => {
    if (index) offset += distance(column[index - 1], item);
    item.offset = offset;
    let [weight, sum] = [0, 0];
    for (const other of item.neighbours) {
      const strength = isBox(item) ? (isBox(other) ? 1 : 2) : isBox(other) ? 2 : 8;
      weight += strength;
      sum += strength * centre(other);
    }
    if (!weight) [weight, sum] = [0.1, 0.1 * centre(item)];
    let pool = { items: [item], weight, sum: sum - weight * (item.across / 2 + offset) };
    while (pools.length && pools.at(-1).sum / pools.at(-1).weight >= pool.sum / pool.weight) {
      const before = pools.pop();
      before.items.push(...pool.items);
      before.weight += pool.weight;
      before.sum += pool.sum;
      pool = before;
    }
    pools.push(pool);
  });
  // No column may extend further than the highest one, whose boxes have no free room.
  const last = most - offset - (column.at(-1)?.across ?? 0);
  for (const { items, weight, sum } of pools) {
    const start = Math.max(-most, Math.min(last, sum / weight));
    for (const item of items) item.start = start + item.offset;
  }
}

/** Gap after each layer: the longest label of an edge that begins or ends there. */
function gapsAfter(layers, joins, runsDown) {
  const gaps = layers.map(() => LAYER_GAP);
  if (runsDown || joins.length > MAX_LABELLED) return gaps;
  for (const { edge, tail, head, bends } of joins) {
    if (bends.length || head.layer !== tail.layer + 1) continue;
    const room = Math.min(LONGEST_LABEL, (edge.label?.length ?? 0) * CHARACTER) + 32;
    gaps[tail.layer] = Math.max(gaps[tail.layer], room);
  }
  return gaps;
}

/**
 * Set positions along: `near` and `far` are the sides of an item's layer. Returns the total length.
 */
function placeAlong(layers, folded, gaps) {
  let near = 0;
  let far = 0;
  layers.forEach((layer, number) => {
    const columns = [];
    for (const item of layer) if (isBox(item)) (columns[item.column ?? 0] ??= []).push(item);
    far = near;
    columns.forEach((column, index) => {
      const width = column.reduce((most, { along }) => Math.max(most, along), 0);
      const begin = index ? far + COLUMN_GAP : near;
      for (const item of column) item.begin = begin + (width - item.along) / 2;
      far = begin + width;
    });
    for (const item of layer) [item.near, item.far] = [near, far];
    near = far + gaps[number];
  });
  return far;
}

/** Convert positions to x and y, starting at 0. */
function picture(items, joins, length, runsDown) {
  const all = [...items, ...joins.flatMap(({ bends }) => bends)];
  const first = all.reduce((least, { start }) => Math.min(least, start), Infinity);
  const last = all.reduce((most, { start, across }) => Math.max(most, start + across), first);
  const point = (along, across) =>
    runsDown ? { x: across - first, y: along } : { x: along, y: across - first };
  const at = new Map(items.map((item) => [item.box.id, point(item.begin, item.start)]));
  const bends = new Map();
  for (const { edge, tail, head, bends: passed } of joins) {
    const points = [];
    // Edges leave and enter layers straight; they bend only between layers.
    if (tail.far > tail.begin + tail.along) points.push(point(tail.far, centre(tail)));
    for (const bend of passed) {
      points.push(point(bend.near, centre(bend)), point(bend.far, centre(bend)));
    }
    if (head.near < head.begin) points.push(point(head.near, centre(head)));
    bends.set(edge.key, points);
  }
  const across = items.length ? last - first : 0;
  const [width, height] = runsDown ? [across, length] : [length, across];
  return { at, bends, frames: framesOf(items, at), runsDown, width, height };
}

/**
 * Frame each group with several members; use one frame per layer if it would enclose other boxes.
 */
function framesOf(items, at) {
  const groups = groupBy(items, ({ group }) => group);
  groups.delete(null);
  return [...groups].flatMap(([group, members]) => {
    if (members.length < 2) return [];
    const whole = { group, ...around(members, at) };
    const isClean = items.every((item) => item.group === group || isApart(around([item], at), whole));
    if (isClean) return [whole];
    const layers = groupBy(members, ({ layer }) => layer);
    return [...layers.values()].map((each) => ({ group, ...around(each, at) }));
  });
}

function groupBy(items, keyOf) {
  const found = new Map();
  for (const item of items) {
    if (!found.has(keyOf(item))) found.set(keyOf(item), []);
    found.get(keyOf(item)).push(item);
  }
  return found;
}

function around(items, at) {
  const frame = { left: Infinity, top: Infinity, right: -Infinity, bottom: -Infinity };
  for (const { box } of items) {
    const { x, y } = at.get(box.id);
    const { width, height } = sizeOf(box);
    frame.left = Math.min(frame.left, x);
    frame.top = Math.min(frame.top, y);
    frame.right = Math.max(frame.right, x + width);
    frame.bottom = Math.max(frame.bottom, y + height);
  }
  return frame;
}

function isApart(one, other) {
  const isBeside = one.right < other.left || one.left > other.right;
  return isBeside || one.bottom < other.top || one.top > other.bottom;
}
