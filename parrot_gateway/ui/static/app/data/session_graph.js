/**
 * One session's calls, variables and edges, kept up to date by its event stream.
 *
 * Times are seconds since the first submission kept at the start of the stream.
 */

import { batch, signal } from "../../vendor/preact.js";
import { followStream } from "./event_stream.js";
import { forget, onNextFrame } from "./frame.js";

/** @typedef {{key: string, from: string, to: string, label: string, inferred: boolean,
 *   confidence: number, kinds: string[], isImplied?: boolean}} Edge */

const TIMES = ["submitted_s", "placed_s", "started_s", "first_token_s", "finished_s"];

/** Graph size from which changes are collected, and for how long. */
const LARGE = 200;
const LARGE_PAUSE_MS = 250;

const isUnfinished = (node) => node.state === "running" || node.state === "waiting";

export class SessionGraph {
  /** "connecting", "live", "lost" or "refused". */
  connection = signal("connecting");
  error = signal(null);
  /** Incremented when states or times have changed. */
  revision = signal(0);
  /** Incremented when nodes or edges have come or gone. */
  structure = signal(0);
  id;
  session = { id: "", name: "" };
  isInferred = false;
  isClosed = false;
  notKept = 0;
  /** True if its calls ran on several engines, so that the page names them. */
  hasSeveralEngines = false;
  /** Calls and transforms by id, in order of submission. */
  nodes = new Map();
  variables = new Map();
  links = new Map();
  #now = 0;
  /** The first submission in the stream's own time, once there is one. */
  #origin = null;
  #receivedAt = performance.now();
  #boxes = null;
  #edges = null;
  #close = () => {};
  #timer = 0;
  #isRestructured = false;
  #bump = () => {
    this.#timer = 0;
    batch(() => {
      if (this.#isRestructured) this.structure.value = this.structure.peek() + 1;
      this.#isRestructured = false;
      this.revision.value = this.revision.peek() + 1;
    });
  };

  /** @param {string | null} key result of `keyOf`; null follows nothing, see `show` */
  constructor(key) {
    this.id = key;
    if (key === null) return;
    this.#close = followStream(`/ui/api/sessions/${encodeURIComponent(key)}/events`, {
      endsClosed: true,
      onEvent: (name, data) => this.#apply(name, data),
      onState: (state, error) => {
        this.connection.value = state;
        this.error.value = error ?? null;
      },
    });
  }

  /** Show a graph from elsewhere, given as the data of an event `graph`. */
  show(data) {
    this.#apply("graph", data);
  }

  close() {
    this.#close();
    forget(this.#bump);
    clearTimeout(this.#timer);
  }

  /** Seconds since the beginning; advances while something runs. */
  get now() {
    if (this.isClosed || this.connection.value !== "live" || !this.isRunning) return this.end;
    return this.#now + (performance.now() - this.#receivedAt) / 1000;
  }

  get isRunning() {
    for (const node of this.nodes.values()) if (isUnfinished(node)) return true;
    return false;
  }

  /** End of the last call, or the latest known time while some are unfinished. */
  get end() {
    let end = 0;
    for (const node of this.nodes.values()) {
      end = Math.max(end, node.finished_s ?? (isUnfinished(node) ? this.#now : node.submitted_s));
    }
    return end;
  }

  /** Boxes of the picture: nodes, and variables that no kept node writes. */
  get boxes() {
    this.#boxes ??= [
      ...this.nodes.values(),
      ...[...this.variables.values()]
        .filter((each) => !this.nodes.has(each.producer) && this.#isRead(each))
        .map((each) => ({ ...each, kind: "variable", submitted_s: 0 })),
    ];
    return this.#boxes;
  }

  /** @returns {Edge[]} declared ones first, then inferred ones; one per pair of boxes */
  get edges() {
    this.#edges ??= markImplied([...this.#declared(), ...this.#inferred()]);
    return this.#edges;
  }

  #isRead(variable) {
    return variable.consumers.some((id) => this.nodes.has(id));
  }

  #declared() {
    const edges = new Map();
    for (const node of this.nodes.values()) {
      for (const id of node.inputs) {
        const variable = this.variables.get(id);
        if (!variable) continue;
        const from = this.nodes.has(variable.producer) ? variable.producer : variable.id;
        const key = `${from} ${node.id}`;
        const known = edges.get(key);
        if (known) known.label = [known.label, variable.name].filter(Boolean).join(", ");
        else {
          // A label that repeats its producer's name is left out.
          const producer = this.nodes.get(variable.producer);
          const label = !producer || producer.name === variable.name ? "" : variable.name;
          edges.set(key, { key, from, to: node.id, label, inferred: false, confidence: 1, kinds: [] });
        }
      }
    }
    return edges.values();
  }

  #inferred() {
    const edges = new Map();
    for (const { from, to, kind, confidence } of this.links.values()) {
      if (!this.nodes.has(from) || !this.nodes.has(to)) continue;
      const key = `${from} ~ ${to}`;
      const known = edges.get(key) ?? { key, from, to, inferred: true, confidence: 0, kinds: [] };
      known.kinds.push(kind);
      known.confidence = Math.max(known.confidence, confidence);
      known.label = `${known.kinds.join(" + ")} ${known.confidence.toFixed(2)}`;
      edges.set(key, known);
    }
    return edges.values();
  }

  #apply(name, data) {
    if (name === "graph") this.#replace(data);
    if (name === "change") this.#change(data);
    if (name === "closed") this.isClosed = true;
    this.hasSeveralEngines = countOf(this.nodes.values(), "engine") > 1;
    if (name === "graph" || name === "closed") this.#bump();
    else this.#bumpSoon();
  }

  /**
   * Announce changes in the next frame; for a large graph, which is slow to draw, collect them
   * first.
   */
  #bumpSoon() {
    if (this.nodes.size <= LARGE) onNextFrame(this.#bump);
    else this.#timer ||= setTimeout(this.#bump, LARGE_PAUSE_MS);
  }

  #replace(data) {
    this.session = data.session;
    this.isInferred = data.inferred;
    this.isClosed = Boolean(data.closed);
    this.notKept = data.calls_not_kept ?? 0;
    this.#origin = null;
    this.#place(data.calls);
    this.nodes = new Map(data.calls.map((node) => [node.id, node]));
    this.variables = new Map(data.variables.map((variable) => [variable.id, variable]));
    this.links = new Map(data.links.map((link) => [linkKey(link), link]));
    this.#setNow(data.now_s ?? data.duration_s);
    this.#restructure();
  }

  #change(data) {
    let isNew = Boolean(data.gone?.length);
    for (const id of data.gone ?? []) this.#drop(id);
    this.#place(data.nodes ?? []);
    for (const node of data.nodes ?? []) {
      const known = this.nodes.get(node.id);
      isNew ||= !known || known.inputs.length !== node.inputs.length;
      this.nodes.set(node.id, node);
    }
    for (const variable of data.variables ?? []) {
      const known = this.variables.get(variable.id);
      isNew ||= !known || known.producer !== variable.producer;
      isNew ||= known.consumers.length !== variable.consumers.length;
      this.variables.set(variable.id, variable);
    }
    for (const link of data.links ?? []) {
      isNew = true;
      this.links.set(linkKey(link), link);
    }
    if (data.calls_not_kept !== undefined) this.notKept = data.calls_not_kept;
    if (data.now_s !== undefined) this.#setNow(data.now_s);
    if (isNew) this.#restructure();
    else this.#boxes = null;
  }

  /** Drop a node that the gateway no longer keeps. */
  #drop(id) {
    this.nodes.delete(id);
    for (const [key, link] of this.links) {
      if (link.from === id || link.to === id) this.links.delete(key);
    }
    for (const [key, variable] of this.variables) {
      const isUsed = this.nodes.has(variable.producer) || this.#isRead(variable);
      if (!isUsed) this.variables.delete(key);
    }
    this.notKept += 1;
  }

  /** Shift the times of new nodes to the page's scale. */
  #place(nodes) {
    if (this.#origin === null && nodes.length) {
      this.#origin = nodes.reduce((least, node) => Math.min(least, node.submitted_s), Infinity);
    }
    for (const node of nodes) {
      for (const name of TIMES) if (node[name] != null) node[name] -= this.#origin;
    }
  }

  #setNow(seconds) {
    this.#now = seconds - (this.#origin ?? 0);
    this.#receivedAt = performance.now();
  }

  #restructure() {
    this.#boxes = null;
    this.#edges = null;
    this.#isRestructured = true;
  }
}

/** Mark edges that a path over one other box duplicates. */
function markImplied(edges) {
  const heads = new Map();
  for (const { from, to } of edges) {
    if (!heads.has(from)) heads.set(from, new Set());
    heads.get(from).add(to);
  }
  for (const edge of edges) {
    const others = heads.get(edge.from);
    // Boxes with very many successors are skipped, to bound the cost.
    if (others.size > 64) continue;
    for (const other of others) {
      if (other !== edge.to && heads.get(other)?.has(edge.to)) edge.isImplied = true;
    }
  }
  return edges;
}

/** Number of different values of a field, null excluded. */
function countOf(nodes, field) {
  const values = new Set();
  for (const node of nodes) if (node[field] !== null) values.add(node[field]);
  return values.size;
}

const linkKey = (link) => `${link.from} ${link.to} ${link.kind}`;

/**
 * State of a call at a moment, from its times; "absent" before it was submitted.
 *
 * @param {number | null} at seconds; null means now
 */
export function stateAt(node, at) {
  if (at === null || node.kind === "variable") return node.state;
  if (node.submitted_s > at) return "absent";
  if (node.finished_s !== null && node.finished_s <= at) return node.state;
  return node.started_s === null || node.started_s > at ? "waiting" : "running";
}
