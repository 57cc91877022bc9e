/** Draws the timeline on a canvas, and finds the call at a point. */

import { stateAt } from "../data/session_graph.js";
import { duration, engineName } from "../format.js";
import { palette, sharpContext } from "../parts/palette.js";

export const LABEL_WIDTH = 118;
export const RIGHT_PAD = 14;
const AXIS = 22;
const LANE_PAD = 6;
const MAX_ROW = 18;
const MIN_ROW = 4;
const FONT = "11px system-ui, sans-serif";
const SMALL = "10.5px system-ui, sans-serif";

/** Choose row heights so that all lanes fit, if possible. */
export function measure({ lanes, gaps }, height) {
  const minLane = 16;
  const gapHeight = gaps.length ? minLane + 2 * LANE_PAD : 0;
  const rows = lanes.reduce((sum, lane) => sum + lane.rows, 0);
  const room = height - AXIS - gapHeight - lanes.length * 2 * LANE_PAD;
  const row = Math.max(MIN_ROW, Math.min(MAX_ROW, Math.floor(room / Math.max(1, rows))));
  const laneHeight = (lane) => Math.max(minLane, lane.rows * row) + 2 * LANE_PAD;
  const total = AXIS + lanes.reduce((sum, lane) => sum + laneHeight(lane), 0) + gapHeight;
  return { row, laneHeight, total, gapHeight };
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {object} drawing `graph, plan, width, height, span, at, now, selected, hovered, critical`;
 *   `span` is the last second shown
 * @returns {{x: number, y: number, width: number, height: number, node: object}[]} bars, for hits
 */
export function paintTimeline(canvas, drawing) {
  const { plan, width, height, span, at } = drawing;
  const measured = measure(plan, height);
  const full = Math.max(height, measured.total);
  const context = sharpContext(canvas, width, full);
  const colours = palette();
  const xOf = (seconds) => LABEL_WIDTH + (seconds / span) * (width - LABEL_WIDTH - RIGHT_PAD);
  paintAxis(context, colours, width, full, span, xOf);
  const bars = [];
  let y = AXIS;
  for (const lane of plan.lanes) {
    const laneHeight = measured.laneHeight(lane);
    paintLaneHead(context, colours, lane.name, y, laneHeight, width);
    for (const each of lane.spans) {
      const top = y + LANE_PAD + each.row * measured.row;
      const bar = paintSpan(context, colours, each, top, measured.row, xOf, drawing);
      if (bar) bars.push(bar);
    }
    y += laneHeight;
  }
  if (plan.gaps.length) paintGaps(context, colours, plan.gaps, y, measured.gapHeight, xOf, width);
  paintPlayhead(context, colours, at, full, xOf);
  return bars;
}

function paintAxis(context, colours, width, height, span, xOf) {
  const step = niceStep(span / Math.max(2, (width - LABEL_WIDTH) / 96));
  context.font = SMALL;
  context.textBaseline = "middle";
  context.textAlign = "center";
  context.lineWidth = 1;
  for (let tick = 0; tick <= span * 1.0001; tick += step) {
    const x = Math.round(xOf(tick)) + 0.5;
    context.strokeStyle = colours.line;
    context.beginPath();
    context.moveTo(x, AXIS - 4);
    context.lineTo(x, height);
    context.stroke();
    context.fillStyle = colours.muted;
    if (x < width - 24) context.fillText(tickLabel(tick, step, span), x, AXIS / 2);
  }
}

/** Label all ticks in one unit, with the digits that the step needs. */
function tickLabel(tick, step, span) {
  if (tick === 0) return "0";
  if (span < 1) return `${Math.round(tick * 1000)} ms`;
  if (span >= 600) return duration(tick);
  return `${tick.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)))} s`;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1e-4)));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least) ?? 10 * power;
}

function paintLaneHead(context, colours, name, y, height, width) {
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(0, y + height - 0.5);
  context.lineTo(width, y + height - 0.5);
  context.stroke();
  context.font = FONT;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillStyle = colours.text;
  context.fillText(clip(context, engineName(name), LABEL_WIDTH - 20), 12, y + height / 2);
}

function clip(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

/** Queue hatched, fill light, generation strong; times after the replayed moment faint. */
function paintSpan(context, colours, each, top, row, xOf, drawing) {
  const { node, ready, from, until } = each;
  const { graph, at, selected, hovered, critical } = drawing;
  const state = stateAt(node, at);
  const height = Math.max(2, row - (row > 7 ? 3 : 1));
  const first = node.first_token_s ?? (node.finished_s === null ? until : from);
  const [x0, x1, x2, x3] = [xOf(ready), xOf(from), xOf(Math.min(Math.max(first, from), until)), xOf(until)];
  const isChosen = node.id === selected || node.id === hovered;
  const isDimmed = graph.nodes.has(selected) && !isChosen;
  context.globalAlpha = state === "absent" ? 0.14 : isDimmed ? 0.5 : 1;
  if (x1 - x0 > 1) {
    const thin = Math.min(height, 6);
    queueBar(context, colours, x0, top + (height - thin) / 2, x1 - x0, thin);
  }
  if (node.started_s !== null) {
    const isBad = node.state === "failed" || node.state === "cancelled";
    context.fillStyle = colours.fill;
    context.fillRect(x1, top, Math.max(0, x2 - x1), height);
    context.fillStyle = isBad ? colours[node.state] : colours.generate;
    context.fillRect(x2, top, Math.max(1.5, x3 - x2), height);
    if (row >= 13 && x3 - x1 > 46) {
      context.font = SMALL;
      context.textAlign = "left";
      context.textBaseline = "middle";
      const room = x3 - Math.max(x2, x1) - 8;
      if (room > 34) {
        context.fillStyle = colours.surface;
        context.fillText(clip(context, node.name, room), x2 + 5, top + height / 2);
      }
    }
  }
  if (critical.nodes.has(node.id) && node.started_s !== null) {
    context.fillStyle = colours.critical;
    context.fillRect(x1, top + height - (row > 7 ? 2.5 : 1.5), Math.max(2, x3 - x1), row > 7 ? 2.5 : 1.5);
  }
  if (isChosen) {
    context.strokeStyle = colours.text;
    context.lineWidth = 1.6;
    context.strokeRect(x1 - 1, top - 1, Math.max(3, x3 - x1 + 2), height + 2);
  }
  if (node.id === selected && xOf(node.submitted_s) < x0 - 1) {
    context.strokeStyle = colours.muted;
    context.setLineDash([2, 3]);
    context.beginPath();
    context.moveTo(xOf(node.submitted_s), top + height / 2);
    context.lineTo(x0, top + height / 2);
    context.stroke();
    context.setLineDash([]);
  }
  context.globalAlpha = 1;
  return { x: Math.min(x0, x1), y: top - 1, width: Math.max(6, x3 - Math.min(x0, x1)), height: row, node };
}

function queueBar(context, colours, x, y, width, height) {
  if (height < 4) {
    // Too thin for hatching.
    const alpha = context.globalAlpha;
    context.globalAlpha = alpha * 0.5;
    context.fillStyle = colours.queue;
    context.fillRect(x, y, width, height);
    context.globalAlpha = alpha;
    return;
  }
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colours.queue;
  context.lineWidth = 1.4;
  context.beginPath();
  // Hatched; a long bar on a dense timeline gets few lines.
  const step = Math.max(5, width / 300);
  for (let at = x - height; at < x + width; at += step) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  context.restore();
}

function paintGaps(context, colours, gaps, y, height, xOf, width) {
  paintLaneHead(context, colours, "client", y, height, width);
  const middle = y + height / 2;
  context.font = SMALL;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const { from, until, label } of gaps) {
    const [x0, x1] = [xOf(from), xOf(until)];
    context.strokeStyle = colours.muted;
    context.setLineDash([2, 2]);
    context.beginPath();
    context.moveTo(x0 + 1, middle);
    context.lineTo(x1 - 1, middle);
    context.stroke();
    context.setLineDash([]);
    const text = label ? clip(context, label, x1 - x0 - 12) : "";
    if (text.length > 2) {
      const half = context.measureText(text).width / 2 + 4;
      context.fillStyle = colours.surface;
      context.fillRect((x0 + x1) / 2 - half, middle - 7, 2 * half, 14);
      context.fillStyle = colours.muted;
      context.fillText(text, (x0 + x1) / 2, middle + 0.5);
    }
  }
}

function paintPlayhead(context, colours, at, height, xOf) {
  if (at === null) return;
  const x = Math.round(xOf(at)) + 0.5;
  context.strokeStyle = colours.accent;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x, 2);
  context.lineTo(x, height);
  context.stroke();
}

/** The call whose bar is under a point; the nearest one if bars are thin. */
export function barUnder(bars, x, y) {
  const slack = 2;
  for (let i = bars.length - 1; i >= 0; i -= 1) {
    const bar = bars[i];
    const isOver =
      x >= bar.x - slack && x <= bar.x + bar.width + slack && y >= bar.y && y <= bar.y + bar.height;
    if (isOver) return bar.node;
  }
  return null;
}
