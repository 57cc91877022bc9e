/** Layout beside the page's own thread: dagre for small graphs, layers for large ones. */

import { Graph, layout } from "../../vendor/dagre.js";
import { placeInLayers } from "./layered.js";

/** dagre takes a second for some 200 boxes, and half a minute for a thousand. */
const DAGRE_MAX_BOXES = 120;
const DAGRE_MAX_EDGES = 300;
/** Layers of more boxes are better folded than drawn as one line. */
const DAGRE_MAX_PARALLEL = 9;
/** Labels get room between layers in graphs of so many edges. */
const MAX_LABELLED = 60;
const CHARACTER = 5.6;
const LONGEST_LABEL = 150;
/** Room for the borders and the name of a group's frame, beyond its members. */
const FRAME = 36;

addEventListener("message", ({ data: { request, boxes, edges, aspect } }) => {
  const placed = isForDagre(boxes, edges)
    ? bestByDagre(boxes, edges, aspect)
    : { ...placeInLayers(boxes, edges, aspect), runsDown: false };
  postMessage({ request, ...placed });
});

function isForDagre(boxes, edges) {
  if (boxes.length > DAGRE_MAX_BOXES || edges.length > DAGRE_MAX_EDGES) return false;
  const parallel = new Map();
  for (const { stage } of boxes) parallel.set(stage, (parallel.get(stage) ?? 0) + 1);
  return Math.max(0, ...parallel.values()) <= DAGRE_MAX_PARALLEL;
}

/** To the right; in a pane that is higher than wide down, if more can be read so. */
function bestByDagre(boxes, edges, aspect) {
  const right = placeByDagre(boxes, edges, false);
  if (aspect >= 0.8) return right;
  const down = placeByDagre(boxes, edges, true);
  const scaleOf = ({ width, height }) => Math.min(aspect / width, 1 / height);
  return scaleOf(down) >= scaleOf(right) ? down : right;
}

/** Groups are clusters to dagre, at a price in looks, only where frames would enclose others. */
function placeByDagre(boxes, edges, runsDown) {
  const placed = run(boxes, edges, runsDown, false);
  return areFramesClean(boxes, placed.at) ? placed : run(boxes, edges, runsDown, true);
}

function run(boxes, edges, runsDown, hasClusters) {
  const graph = new Graph({ compound: true });
  graph.setGraph({
    rankdir: runsDown ? "TB" : "LR",
    nodesep: runsDown ? 20 : 16,
    edgesep: 8,
    ranksep: runsDown ? 44 : 56,
    ranker: "network-simplex",
  });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const { id, width, height, group } of boxes) {
    graph.setNode(id, { width, height });
    if (hasClusters && group) {
      graph.setNode(`group ${group}`, {});
      graph.setParent(id, `group ${group}`);
    }
  }
  for (const { from, to, label } of edges) {
    const isLabelled = label && edges.length <= MAX_LABELLED;
    const width = isLabelled ? Math.min(LONGEST_LABEL, label.length * CHARACTER) : 0;
    graph.setEdge(from, to, isLabelled && !runsDown ? { width, height: 14, labelpos: "c" } : {});
  }
  layout(graph);
  const at = new Map();
  for (const { id, width, height } of boxes) {
    const { x, y } = graph.node(id);
    at.set(id, { x: x - width / 2, y: y - height / 2 });
  }
  const bends = new Map();
  for (const { key, from, to } of edges) {
    // Bends matter where an edge passes layers; a label is a bend as well.
    const points = graph.edge(from, to)?.points ?? [];
    bends.set(key, points);
  }
  orderAlikes(boxes, edges, at, bends, runsDown);
  const size = graph.graph();
  return { at, bends, runsDown, width: size.width ?? 0, height: size.height ?? 0 };
}

/** Boxes with the same neighbours stand in the order in which they were submitted. */
function orderAlikes(boxes, edges, at, bends, runsDown) {
  const around = new Map(boxes.map(({ id }) => [id, []]));
  for (const { key, from, to } of edges) {
    // An edge that passes layers has bends of its own.
    const isBent = bends.get(key).length > 3;
    around.get(from).push(isBent ? key : `> ${to}`);
    around.get(to).push(isBent ? key : `< ${from}`);
  }
  const alike = new Map();
  for (const { id, width, height } of boxes) {
    const { x, y } = at.get(id);
    const key = [...around.get(id).sort(), runsDown ? y : x, width, height].join("|");
    if (!alike.has(key)) alike.set(key, []);
    alike.get(key).push(id);
  }
  for (const ids of alike.values()) {
    const places = ids.map((id) => at.get(id)).sort((a, b) => (runsDown ? a.x - b.x : a.y - b.y));
    ids.forEach((id, index) => at.set(id, places[index]));
  }
}

/** No box stands within the frame of a group that it is not in, and no two frames overlap. */
function areFramesClean(boxes, at) {
  const frames = new Map();
  for (const { id, group, width, height } of boxes) {
    if (!group) continue;
    const { x, y } = at.get(id);
    const frame = frames.get(group) ?? [Infinity, Infinity, -Infinity, -Infinity];
    frames.set(group, [
      Math.min(frame[0], x), Math.min(frame[1], y),
      Math.max(frame[2], x + width), Math.max(frame[3], y + height),
    ]);
  }
  const all = [...frames.values()];
  const isApart = ([a, b, c, d], [left, top, right, bottom]) =>
    a > right + FRAME || c < left - FRAME || b > bottom + FRAME || d < top - FRAME;
  if (!all.every((one, index) => all.slice(index + 1).every((other) => isApart(one, other)))) return false;
  return boxes.every(({ id, group, width, height }) => {
    const { x, y } = at.get(id);
    return [...frames].every(
      ([name, [left, top, right, bottom]]) =>
        name === group || x > right || x + width < left || y > bottom || y + height < top,
    );
  });
}
