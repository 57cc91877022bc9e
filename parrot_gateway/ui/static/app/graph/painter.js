/**
 * Draws edges and group frames on a canvas behind the nodes, and marks for nodes without elements,
 * such as at scales too small for text.
 */

import { stateAt } from "../data/session_graph.js";
import { palette, sharpContext } from "../parts/palette.js";
import { sizeOf } from "./sizes.js";

/** Below this scale nodes are drawn here as marks without text. */
export const TEXT_SCALE = 0.42;
/** Scales from which edges have arrowheads, and labels. */
const HEAD_SCALE = 0.25;
const LABEL_SCALE = 0.72;
const MAX_LABELLED_EDGES = 60;
/** Prefix that LangChain puts before a group's own name. */
const RUN_ID = /^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}[\/:]/;
/** From this many edges on, they are drawn faintly behind the nodes. */
const MANY_EDGES = 250;

/**
 * @param {HTMLCanvasElement} canvas
 * @param {object} picture `graph, placed, camera, elements, at, selected, critical, near`
 */
export function paint(canvas, picture) {
  const { camera, placed } = picture;
  const { x, y, scale } = camera.view.value;
  const context = sharpContext(canvas, camera.width, camera.height);
  if (!placed) return;
  context.translate(x, y);
  context.scale(scale, scale);
  const shown = {
    left: -x / scale,
    top: -y / scale,
    right: (camera.width - x) / scale,
    bottom: (camera.height - y) / scale,
  };
  const drawing = { ...picture, context, scale, shown, colours: palette() };
  paintGroups(drawing);
  paintEdges(drawing);
  paintMarks(drawing);
}

/** Frame the declared task groups that have several members. */
function paintGroups({ context, placed, scale, colours }) {
  const pad = 9;
  for (const { group, left, top, right, bottom } of placed.frames) {
    context.beginPath();
    context.roundRect(left - pad, top - pad - 6, right - left + 2 * pad, bottom - top + 2 * pad + 6, 10);
    context.fillStyle = colours.group;
    context.fill();
    context.strokeStyle = colours["line-strong"];
    context.lineWidth = 1 / scale;
    context.stroke();
    if (scale >= TEXT_SCALE) {
      context.font = "10.5px system-ui, sans-serif";
      context.fillStyle = colours.muted;
      context.textAlign = "left";
      context.fillText(`group ${group.replace(RUN_ID, "")}`, left, top - pad - 10, right - left);
    }
  }
}

/** Draw ordinary edges of one look as one path; highlighted ones are drawn above them. */
function paintEdges(drawing) {
  const { context, graph, placed, scale, shown, colours, at, critical, near } = drawing;
  const labelled = [];
  const looks = new Map();
  const above = [];
  const widthOf = (width) => (scale < TEXT_SCALE ? Math.max(width, 0.7 / scale) : width);
  for (const edge of graph.edges) {
    const line = lineOf(edge, graph, placed);
    if (!line || !isShown(line, shown)) continue;
    const target = graph.nodes.get(edge.to);
    if (target && stateAt(target, at) === "absent") continue;
    const isNear = near !== null && (edge.from === near || edge.to === near);
    if (isNear || critical.edges.has(edge.key)) above.push([line, edge.inferred, isNear]);
    else {
      const alpha = near !== null ? 0.25 : faintness(edge, graph);
      const key = `${alpha} ${edge.inferred}`;
      if (!looks.has(key)) {
        looks.set(key, { alpha, isDashed: edge.inferred, lines: new Path2D(), heads: new Path2D() });
      }
      const look = looks.get(key);
      trace(look.lines, line);
      if (scale >= HEAD_SCALE) arrowHead(look.heads, line);
    }
    if (scale >= LABEL_SCALE && edge.label) {
      if (isNear || graph.edges.length <= MAX_LABELLED_EDGES) labelled.push([edge, line, isNear]);
    }
  }
  for (const [line, isDashed, isNear] of above.sort((a, b) => a[2] - b[2])) {
    const look = { alpha: 1, isDashed, lines: new Path2D(), heads: new Path2D(), isNear, isAbove: true };
    trace(look.lines, line);
    arrowHead(look.heads, line);
    looks.set(look, look);
  }
  for (const { alpha, isDashed, lines, heads, isNear, isAbove } of looks.values()) {
    context.globalAlpha = alpha;
    const colour = isNear ? colours.accent : isAbove ? colours.critical : colours.edge;
    context.strokeStyle = colour;
    context.fillStyle = colour;
    context.lineWidth = widthOf(isAbove ? 2 : 1.3);
    context.setLineDash(isDashed ? [5, 4] : []);
    context.stroke(lines);
    if (scale >= HEAD_SCALE) context.fill(heads);
  }
  context.setLineDash([]);
  context.globalAlpha = 1;
  labels(drawing, labelled);
}

/** Edges implied by another path are faint, and so are less certain ones. */
function faintness(edge, graph) {
  if (edge.isImplied) return 0.28;
  if (graph.edges.length > MANY_EDGES) return 0.4;
  // Few steps, so that many edges share a look.
  return edge.inferred ? 0.4 + Math.round(edge.confidence * 4) / 8 : 0.9;
}

/** Points of an edge, from the side of one box to the side of the other. */
function lineOf(edge, graph, placed) {
  const [from, to] = [placed.at.get(edge.from), placed.at.get(edge.to)];
  if (!from || !to) return null;
  const tail = sizeOf(graph.nodes.get(edge.from) ?? { kind: "variable" });
  const head = sizeOf(graph.nodes.get(edge.to) ?? { kind: "variable" });
  const { runsDown } = placed;
  const start = runsDown
    ? { x: from.x + tail.width / 2, y: from.y + tail.height }
    : { x: from.x + tail.width, y: from.y + tail.height / 2 };
  const end = runsDown
    ? { x: to.x + head.width / 2, y: to.y }
    : { x: to.x, y: to.y + head.height / 2 };
  return { points: [start, ...(placed.bends.get(edge.key) ?? []), end], runsDown };
}

function isShown({ points }, shown) {
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (const { x, y } of points) {
    left = Math.min(left, x);
    right = Math.max(right, x);
    top = Math.min(top, y);
    bottom = Math.max(bottom, y);
  }
  return right >= shown.left && left <= shown.right && bottom >= shown.top && top <= shown.bottom;
}

/** Trace curves that leave and reach every point along the picture's direction. */
function trace(path, { points, runsDown }) {
  path.moveTo(points[0].x, points[0].y);
  for (let i = 1; i < points.length; i += 1) {
    const [a, b] = [points[i - 1], points[i]];
    const along = runsDown ? b.y - a.y : b.x - a.x;
    const reach = along > 0 ? along / 2 : Math.min(140, 40 - along / 2);
    if (runsDown) path.bezierCurveTo(a.x, a.y + reach, b.x, b.y - reach, b.x, b.y);
    else path.bezierCurveTo(a.x + reach, a.y, b.x - reach, b.y, b.x, b.y);
  }
}

function arrowHead(path, { points, runsDown }) {
  const { x, y } = points.at(-1);
  path.moveTo(x, y);
  path.lineTo(...(runsDown ? [x - 3.6, y - 7] : [x - 7, y - 3.6]));
  // Filling closes the path.
  path.lineTo(...(runsDown ? [x + 3.6, y - 7] : [x - 7, y + 3.6]));
}

/**
 * Label edges from or to one box with equal text only once.
 *
 * @returns {[object, object, boolean, number][]} edge, line, true if near, and number of edges
 */
function bundled(labelled) {
  const into = countOf(labelled, ([edge]) => `${edge.to} ${edge.label}`);
  const bundles = new Map();
  for (const each of labelled) {
    const [{ key, from, to, label }, , isNear] = each;
    const end = into.get(`${to} ${label}`) > 1 ? `> ${to}` : `${from} >`;
    const name = isNear ? key : `${end} ${label}`;
    if (!bundles.has(name)) bundles.set(name, []);
    bundles.get(name).push(each);
  }
  const named = [...bundles.values()].map((each) => [...each[each.length >> 1], each.length]);
  return named.sort((a, b) => b[2] - a[2]);
}

function countOf(items, keyOf) {
  const counts = new Map();
  for (const item of items) counts.set(keyOf(item), (counts.get(keyOf(item)) ?? 0) + 1);
  return counts;
}

/** Draw edge labels at the middle of the longest piece, unless they cover another label. */
function labels({ context, colours }, labelled) {
  context.font = "10.5px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  const taken = [];
  for (const [edge, { points, runsDown }, isNear, number] of bundled(labelled)) {
    const { x, y, room } = longestPiece(points, runsDown);
    const label = edge.label.length > 26 ? `${edge.label.slice(0, 25)}…` : edge.label;
    const text = number > 1 ? `${label} × ${number}` : label;
    const half = context.measureText(text).width / 2 + 4;
    if (!isNear && !runsDown && 2 * half > room) continue;
    if (taken.some((each) => Math.abs(each.x - x) < each.half + half && Math.abs(each.y - y) < 15)) continue;
    taken.push({ x, y, half });
    context.fillStyle = colours.surface;
    context.globalAlpha = 0.9;
    context.beginPath();
    context.roundRect(x - half, y - 8, 2 * half, 16, 4);
    context.fill();
    context.globalAlpha = 1;
    context.fillStyle = isNear ? colours.accent : colours.muted;
    context.fillText(text, x, y + 0.5);
  }
  context.textBaseline = "alphabetic";
}

function longestPiece(points, runsDown) {
  let longest = { room: -Infinity };
  for (let i = 1; i < points.length; i += 1) {
    const [a, b] = [points[i - 1], points[i]];
    const room = (runsDown ? b.y - a.y : b.x - a.x) - 16;
    if (room > longest.room) longest = { room, x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 };
  }
  return longest;
}

/** Draw nodes as marks: a block in the state's colour, with a notch if failed. */
function paintMarks({ context, graph, placed, elements, scale, shown, colours, at, selected, critical }) {
  const isText = new Set(scale < TEXT_SCALE ? [] : elements.map((box) => box.id));
  for (const box of graph.boxes) {
    if (isText.has(box.id)) continue;
    const place = placed.at.get(box.id);
    if (!place) continue;
    const { width, height } = sizeOf(box);
    const { x, y } = place;
    if (x > shown.right || x + width < shown.left || y > shown.bottom || y + height < shown.top) continue;
    const state = stateAt(box, at);
    const colour = colours[state] ?? colours.waiting;
    context.beginPath();
    context.roundRect(x, y, width, height, box.kind === "variable" ? height / 2 : 8);
    if (state === "absent" || state === "waiting" || state === "empty") {
      context.fillStyle = colours.raised;
      context.fill();
      context.strokeStyle = state === "absent" ? colours.line : colour;
      context.lineWidth = 1 / scale;
      context.stroke();
    } else {
      context.globalAlpha = state === "done" || state === "ready" ? 0.55 : 1;
      context.fillStyle = colour;
      context.fill();
      context.globalAlpha = 1;
    }
    if (state === "failed") cross(context, x, y, width, height, colours.surface, scale);
    if (critical.nodes.has(box.id) || box.id === selected) {
      context.strokeStyle = box.id === selected ? colours.accent : colours.critical;
      context.lineWidth = (box.id === selected ? 3 : 2) / scale;
      context.stroke();
    }
  }
}

function cross(context, x, y, width, height, colour, scale) {
  const [cx, cy, r] = [x + width / 2, y + height / 2, height / 4];
  context.save();
  context.beginPath();
  context.moveTo(cx - r, cy - r);
  context.lineTo(cx + r, cy + r);
  context.moveTo(cx + r, cy - r);
  context.lineTo(cx - r, cy + r);
  context.strokeStyle = colour;
  context.lineWidth = Math.max(5, 1.4 / scale);
  context.stroke();
  context.restore();
  context.beginPath();
  context.roundRect(x, y, width, height, 8);
}
