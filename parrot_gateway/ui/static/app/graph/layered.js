/**
 * Places boxes in layers: for graphs that are too large or too wide for dagre.
 *
 * Linear in boxes and edges. A layer with many boxes is folded into several columns, so that a
 * thousand parallel calls are a block and not a line.
 */

import { CALL_SIZE } from "./sizes.js";

const SWEEPS = 4;
const BOX_GAP = 14;
const COLUMN_GAP = 26;
const LAYER_GAP = 84;
/** Boxes above each other before a layer is folded, at least. */
const MIN_ROWS = 6;

/**
 * @param {{id: string, width: number, height: number, group: string | null}[]} boxes
 * @param {{from: string, to: string}[]} edges
 * @param {number} aspect width by height of the pane that it is for
 * @returns {{at: Map<string, {x: number, y: number}>, sides: Map<string, {left: number,
 *   right: number}>, width: number, height: number}} upper left corners of boxes, and the sides
 *   of the layers that they are in
 */
export function placeInLayers(boxes, edges, aspect) {
  const number = new Map(boxes.map((box, index) => [box.id, index]));
  const heads = boxes.map(() => []);
  const tails = boxes.map(() => []);
  for (const { from, to } of edges) {
    const [tail, head] = [number.get(from), number.get(to)];
    if (tail === undefined || head === undefined || tail === head) continue;
    heads[tail].push(head);
    tails[head].push(tail);
  }
  const layers = untangle(layersOf(heads, tails), heads, tails);
  for (const row of layers) orderAlikes(row, heads, tails);
  keepGroupsTogether(layers, boxes);
  return placeColumns(layers, boxes, bestRows(layers, aspect));
}

/** Longest paths, by Kahn's order; a cycle, which there should not be, is cut where it is met. */
function layersOf(heads, tails) {
  const layer = new Array(heads.length).fill(0);
  const missing = tails.map((each) => each.length);
  const ready = [];
  const done = new Array(heads.length).fill(false);
  missing.forEach((count, box) => count === 0 && ready.push(box));
  for (let next = 0, seen = 0; seen < heads.length; seen += 1) {
    if (next === ready.length) ready.push(done.indexOf(false));
    const box = ready[next++];
    done[box] = true;
    for (const head of heads[box]) {
      if (done[head]) continue;
      layer[head] = Math.max(layer[head], layer[box] + 1);
      if (--missing[head] === 0) ready.push(head);
    }
  }
  // What nothing leads to stands right before its first reader.
  for (let box = 0; box < layer.length; box += 1) {
    if (!tails[box].length && heads[box].length) {
      const first = heads[box].reduce((least, head) => Math.min(least, layer[head]), Infinity);
      layer[box] = Math.max(0, first - 1);
    }
  }
  const layers = [];
  layer.forEach((depth, box) => (layers[depth] ??= []).push(box));
  return Array.from(layers, (each) => each ?? []);
}

/** Sort each layer by the mean place of its neighbours, forth and back. */
function untangle(layers, heads, tails) {
  const place = new Array(heads.length).fill(0);
  const note = (row) => row.forEach((box, index) => (place[box] = index - row.length / 2));
  layers.forEach(note);
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
    const neighbours = sweep % 2 ? heads : tails;
    for (const row of sweep % 2 ? [...layers].reverse() : layers) {
      const mean = new Map(
        row.map((box) => {
          const around = neighbours[box];
          const sum = around.reduce((total, other) => total + place[other], 0);
          return [box, around.length ? sum / around.length : place[box]];
        }),
      );
      row.sort((a, b) => mean.get(a) - mean.get(b));
      note(row);
    }
  }
  return layers;
}

/** Boxes with the same neighbours stand in the order in which they were submitted. */
function orderAlikes(row, heads, tails) {
  const alike = new Map();
  row.forEach((box, index) => {
    const key = `${tails[box].join()} ${heads[box].join()}`;
    if (!alike.has(key)) alike.set(key, []);
    alike.get(key).push(index);
  });
  for (const places of alike.values()) {
    const members = places.map((index) => row[index]).sort((a, b) => a - b);
    places.forEach((index, number) => (row[index] = members[number]));
  }
}

/** Members of a task group stand beside each other, where the first of them stood. */
function keepGroupsTogether(layers, boxes) {
  for (const row of layers) {
    const first = new Map();
    row.forEach((box, index) => {
      const { group } = boxes[box];
      if (group !== null && !first.has(group)) first.set(group, index);
    });
    const rank = new Map(row.map((box, index) => [box, first.get(boxes[box].group) ?? index]));
    row.sort((a, b) => rank.get(a) - rank.get(b));
  }
}

/** How many rows show the whole picture at the largest scale; of nearly equal ones the most. */
function bestRows(layers, aspect) {
  const widest = layers.reduce((most, row) => Math.max(most, row.length), 1);
  const [across, down] = [CALL_SIZE.width + COLUMN_GAP, CALL_SIZE.height + BOX_GAP];
  let best = { rows: MIN_ROWS, scale: 0 };
  for (let rows = MIN_ROWS; rows <= Math.max(MIN_ROWS, widest); rows += Math.ceil(rows / 16)) {
    const columns = layers.reduce((sum, row) => sum + Math.ceil(row.length / rows), 0);
    const width = columns * across + layers.length * (LAYER_GAP - COLUMN_GAP);
    const scale = Math.min(aspect / width, 1 / (Math.min(rows, widest) * down));
    if (scale >= best.scale * 0.98) best = { rows, scale: Math.max(scale, best.scale) };
  }
  return best.rows;
}

function placeColumns(layers, boxes, rows) {
  const at = new Map();
  const sides = new Map();
  const columns = [];
  let x = 0;
  for (const row of layers) {
    const layerLeft = x;
    const folded = Math.max(1, Math.ceil(row.length / rows));
    const perColumn = Math.ceil(row.length / folded);
    for (let start = 0; start < row.length; start += perColumn) {
      const column = row.slice(start, start + perColumn).map((box) => boxes[box]);
      const width = Math.max(...column.map((box) => box.width));
      const height = column.reduce((sum, box) => sum + box.height + BOX_GAP, -BOX_GAP);
      // Every other column is half a row lower: edges to it run between the boxes before it.
      const lower = (start / perColumn) % 2 ? (CALL_SIZE.height + BOX_GAP) / 2 : 0;
      columns.push({ column, x, width, height: height + lower, lower });
      x += width + COLUMN_GAP;
    }
    for (const box of row) sides.set(boxes[box].id, { left: layerLeft, right: x - COLUMN_GAP });
    x += LAYER_GAP - COLUMN_GAP;
  }
  const height = Math.max(0, ...columns.map((each) => each.height));
  for (const each of columns) {
    let y = (height - each.height) / 2 + each.lower;
    for (const box of each.column) {
      at.set(box.id, { x: each.x + (each.width - box.width) / 2, y });
      y += box.height + BOX_GAP;
    }
  }
  return { at, sides, width: Math.max(0, x - LAYER_GAP), height };
}
