/** Which row of which lane a call has in the timeline. Pure. */

/** A pause of the client that is shorter than this share of the whole is not shown. */
const MIN_GAP_SHARE = 0.004;
const WAITING = "waiting";
const NOT_RUN = "not run";

/**
 * @typedef {object} Lane
 * @property {string} name
 * @property {number} rows
 * @property {{node: object, row: number, ready: number, from: number, until: number}[]} spans
 *   `ready`: from when on the queue is drawn
 * @typedef {{from: number, until: number, label: string}} Gap when no call was under way
 */

/**
 * @param {import("../data/session_graph.js").SessionGraph} graph
 * @param {number} now seconds, where unfinished calls end for the time being
 * @returns {{lanes: Lane[], gaps: Gap[]}} lanes by name; what has no engine last
 */
export function lanesOf(graph, now) {
  const byName = new Map();
  for (const node of graph.nodes.values()) {
    // What still waits for its inputs has no place in time yet.
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

/** An engine; the model where only an upstream knows; else what has become of the call. */
function laneOf(node) {
  if (node.engine) return node.engine;
  const isOver = node.finished_s !== null;
  if (isOver && node.first_token_s === null && node.state !== "done") return NOT_RUN;
  if (node.started_s === null) return isOver ? NOT_RUN : WAITING;
  return node.model ?? WAITING;
}

/** When a call could have begun (its inputs were there), began and ended; null: not yet. */
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

/** Rows without overlaps, each span in the first that is free. */
function pack(spans) {
  spans.sort((a, b) => a.from - b.from || a.until - b.until);
  const ends = [];
  for (const span of spans) {
    let row = ends.findIndex((end) => end <= span.from);
    if (row < 0) row = ends.length;
    // Where others ran in its row while it queued, that part is not drawn.
    span.ready = Math.min(span.from, Math.max(span.ready, ends[row] ?? 0));
    ends[row] = span.until;
    span.row = row;
  }
  return { spans, rows: Math.max(1, ends.length) };
}

/** Times at which nothing was submitted or ran: the client thinks, or runs its tools. */
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
