/** The chain of calls that the session's end waited for. */

/**
 * Walk from the last-ending call back along the input that came last.
 *
 * @param {import("../data/session_graph.js").SessionGraph} graph
 * @returns {{nodes: Set<string>, edges: Set<string>}} ids of boxes, keys of edges
 */
export function criticalPath(graph) {
  const revision = graph.revision.peek();
  const known = found.get(graph);
  if (known?.revision === revision) return known.path;
  const path = walkBack(graph);
  found.set(graph, { revision, path });
  return path;
}

/** Cache, because several views ask for the same path. */
const found = new WeakMap();

function walkBack(graph) {
  const arriving = new Map();
  for (const edge of graph.edges) {
    if (!arriving.has(edge.to)) arriving.set(edge.to, []);
    arriving.get(edge.to).push(edge);
  }
  const endOf = (id) => {
    const node = graph.nodes.get(id);
    return node ? (node.finished_s ?? Infinity) : -1;
  };
  let id = null;
  for (const node of graph.nodes.values()) {
    const isLater = id === null || endOf(node.id) > endOf(id);
    const isDeeper = id !== null && endOf(node.id) === endOf(id) && node.stage > graph.nodes.get(id).stage;
    if (node.state !== "cancelled" && (isLater || isDeeper)) id = node.id;
  }
  const nodes = new Set();
  const edges = new Set();
  while (id !== null && !nodes.has(id)) {
    nodes.add(id);
    let last = null;
    for (const edge of arriving.get(id) ?? []) {
      if (graph.nodes.has(edge.from) && (!last || endOf(edge.from) > endOf(last.from))) last = edge;
    }
    if (last) edges.add(last.key);
    id = last?.from ?? null;
  }
  return nodes.size > 1 ? { nodes, edges } : { nodes: new Set(), edges: new Set() };
}
