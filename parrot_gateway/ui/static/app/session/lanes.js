/** The lane and row of each call in the timeline. Pure. */

/** Client pauses shorter than this share of the whole are not shown. */
const MIN_GAP_SHARE = 0.004;
const WAITING = "waiting";
const NOT_RUN = "not run";

/**
 * @typedef {object} Lane
 * @property {string} name
 * @property {number} rows
 * @property {{node: object, row: number, ready: number, from: number, until: number}[]} spans
 *   `ready`: where the queue's drawing starts
 * @typedef {{from: number, until: number, label: string}} Gap a time without any call
 */

/**
 * @param {import("../data/session_graph.js").SessionGraph} graph
 * @param {number} now seconds, the provisional end of unfinished calls
 * @returns {{lanes: Lane[], gaps: Gap[]}} lanes by name; calls without an engine last
 */
export function lanesOf(graph, now) {
  const byName = new Map();
  for (const node of graph.nodes.values()) {
    // A call that still waits for inputs has no place in time yet.
    const span = spanOf(node, graph, now);
    if (node.kind === "transform" || span === null) continue;
    const name = laneOf(node);
    if (!byName.has(name)) byName.set(name, []);
    byName.get(name).push(span);
  }
  const last = [WAITING, NOT_RUN];
  const names = [...byName.keys()].sort(
    (a, b) => last.indexOf(a) - last.indexOf(b) || a.localeCompare(b, "en", { numeric: true }),
  );
  const lanes = names.map((name) => {
    const spans = byName.get(name);
    if (!last.includes(name)) return { name, ...pack(spans) };
    return { name: `${spans.length} ${name}`, spans, rows: 1 };
  });
  return { lanes, gaps: gapsOf(graph, now) };
}

/** The engine; otherwise the model if only an upstream knows; otherwise the call's fate. */
function laneOf(node) {
  if (node.engine) return node.engine;
  const isOver = node.finished_s !== null;
  if (isOver && node.first_token_s === null && node.state !== "done") return NOT_RUN;
  if (node.started_s === null) return isOver ? NOT_RUN : WAITING;
  return node.model ?? WAITING;
}

/** Times at which a call could begin (inputs ready), began and ended; null if not yet. */
function spanOf(node, graph, now) {
  let ready = node.submitted_s;
  for (const id of node.inputs) {
    const producer = graph.nodes.get(graph.variables.get(id)?.producer);
    if (!producer) continue;
    if (node.started_s === null && producer.finished_s === null) return null;
    ready = Math.max(ready, producer.finished_s ?? now);
  }
  const until = node.finished_s ?? Math.max(now, node.submitted_s);
  const start = node.started_s ?? until;
  return { node, row: 0, ready: Math.min(ready, start), from: start, until };
}

/** Pack spans into rows without overlap, each into the first free row. */
function pack(spans) {
  spans.sort((a, b) => a.from - b.from || a.until - b.until);
  const ends = [];
  for (const span of spans) {
    let row = ends.findIndex((end) => end <= span.from);
    if (row < 0) row = ends.length;
    // The queueing part is not drawn where other calls ran in the row.
    span.ready = Math.min(span.from, Math.max(span.ready, ends[row] ?? 0));
    ends[row] = span.until;
    span.row = row;
  }
  return { spans, rows: Math.max(1, ends.length) };
}

/** Times without submitted or running calls: the client thinks, or runs its tools. */
function gapsOf(graph, now) {
  const busy = [...graph.nodes.values()]
    .map((node) => ({ node, from: node.submitted_s, until: node.finished_s ?? now }))
    .sort((a, b) => a.from - b.from);
  const gaps = [];
  let reached = busy[0]?.until ?? 0;
  let last = busy[0]?.node;
  for (const { node, from, until } of busy) {
    if (from - reached > now * MIN_GAP_SHARE && from - reached > 0.005) {
      const label = last?.tools?.length ? last.tools.join(", ") : "";
      gaps.push({ from: reached, until: from, label });
    }
    if (until > reached) [reached, last] = [until, node];
  }
  return gaps;
}
