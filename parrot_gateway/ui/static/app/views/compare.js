/** Two runs side by side on one time scale. */

import { computed, html, signal, useEffect, useMemo } from "../../vendor/preact.js";
import { keyOf, sessions, sessionsChanged } from "../data/overview.js";
import { SessionGraph } from "../data/session_graph.js";
import { ago, count, duration, percent, plural, titleOf, UNKNOWN } from "../format.js";
import { GraphView } from "../graph/graph_view.js";
import { tick } from "../parts/clock.js";
import { Empty } from "../parts/empty.js";
import { hrefOf, replaceQuery, route } from "../route.js";
import { lanesOf } from "../session/lanes.js";
import { Timeline } from "../session/timeline.js";

/** Maximum sessions offered; others can be compared from their own pages. */
const MAX_OFFERED = 200;

export function Compare() {
  const { query } = route.value;
  const ids = { a: query.get("a"), b: query.get("b") };
  const choose = (side, id) => {
    const next = { ...ids, [side]: id };
    replaceQuery(Object.fromEntries(Object.entries(next).filter(([, value]) => value)));
  };
  return html`<div class="compare">
    <h1 class="unseen">Compare</h1>
    <div class="compare-head">
      <${Choice} side="a" id=${ids.a} choose=${choose} />
      <button type="button" class="icon" aria-label="Swap the sides" onClick=${() => replaceQuery({ ...(ids.b && { a: ids.b }), ...(ids.a && { b: ids.a }) })}>⇄</button>
      <${Choice} side="b" id=${ids.b} choose=${choose} />
    </div>
    ${ids.a && ids.b
      ? html`<${Both} key=${`${ids.a} ${ids.b}`} a=${ids.a} b=${ids.b} />`
      : html`<${Empty} title="Choose two sessions">
          <p>Two runs of one application: with its graph declared and without, before a change and after it. The <a href=${hrefOf("playground")}>playground</a> runs one both ways.</p>
        <//>`}
  </div>`;
}

function Choice({ side, id, choose }) {
  sessionsChanged.value;
  const offered = [...sessions.values()].sort((x, y) => y.started - x.started).slice(0, MAX_OFFERED);
  const isOffered = offered.some((session) => keyOf(session) === id);
  return html`<label><span>${side.toUpperCase()}</span>
    <select value=${id ?? ""} onChange=${(event) => choose(side, event.target.value)}>
      <option value="">choose a session…</option>
      ${id && !isOffered && html`<option value=${id}>${id}</option>`}
      ${offered.map((session) => html`<option key=${keyOf(session)} value=${keyOf(session)}>${titleOf(session)} · ${plural(session.calls, "call")} · ${ago(session.started)}</option>`)}
    </select>
  </label>`;
}

function Both({ a, b }) {
  const graphs = useMemo(() => [new SessionGraph(a), new SessionGraph(b)], [a, b]);
  const shared = useMemo(() => {
    const at = signal(null);
    const span = computed(() => {
      for (const graph of graphs) graph.revision.value;
      tick.value;
      return Math.max(...graphs.map((graph) => graph.now), 1e-3);
    });
    return { at, span, showsPath: signal(true), selected: [signal(null), signal(null)] };
  }, [graphs]);
  useEffect(() => () => graphs.forEach((graph) => graph.close()), [graphs]);
  return html`
    <${Figures} graphs=${graphs} />
    <p class="muted compare-hint">One run of each says little: the first warms engines and caches, and finds other work there. Run both again, in the other order, and see what stays.</p>
    <div class="compare-sides">${graphs.map((graph, index) => html`<${Side} key=${graph.id} graph=${graph} name=${"AB"[index]} shared=${shared} selected=${shared.selected[index]} />`)}</div>`;
}

function Side({ graph, name, shared, selected }) {
  graph.structure.value, sessionsChanged.value;
  if (graph.connection.value === "refused") {
    return html`<section class="compare-side"><p class="failure">${graph.error.value?.message}</p></section>`;
  }
  const views = { graph, at: shared.at, selected, showsPath: shared.showsPath };
  return html`<section class="compare-side" aria-label=${`Run ${name}`}>
    <h2>${name} <a href=${hrefOf("sessions", graph.id)}><bdi>${titleOf(sessions.get(graph.id) ?? graph.session)}</bdi></a></h2>
    <p class="muted">${knowledgeOf(graph)}</p>
    <div class="compare-timeline"><${Timeline} ...${views} span=${shared.span} hasScrubber=${false} /></div>
    <div class="compare-graph"><${GraphView} ...${views} /></div>
  </section>`;
}

/** Describes what the gateway knew about this run while it ran. */
function knowledgeOf({ edges }) {
  if (edges.some((edge) => !edge.inferred)) return "Its graph was declared: the gateway knew what reads what before it ran.";
  if (edges.length) return "Call by call: the gateway saw what feeds what only in the texts.";
  return "No call is known to read another one's text.";
}

/** `[name, value, formatter, true if less is better]`; values of one run. */
function figuresOf(graph) {
  const nodes = [...graph.nodes.values()].filter((node) => node.kind !== "transform");
  const sum = (field) => nodes.reduce((total, node) => total + (node[field] ?? 0), 0);
  const time = (from, to) =>
    nodes.reduce((total, node) => total + (node[from] == null || node[to] == null ? 0 : node[to] - node[from]), 0);
  const { gaps } = lanesOf(graph, graph.now);
  const [prompt, cached] = [sum("prompt_tokens"), sum("cached_tokens")];
  return [
    ["Time", graph.now, duration],
    ["of it no call was under way", gaps.reduce((total, gap) => total + gap.until - gap.from, 0), duration],
    ["Calls", nodes.length, count],
    ["Sum of running times", time("started_s", "finished_s"), duration],
    ["Sum of times to the first token", time("started_s", "first_token_s"), duration],
    ["Prompt tokens", prompt, count],
    ["of them computed", prompt - cached, count],
    ["Found in the cache", prompt ? cached / prompt : null, percent],
    ["Output tokens", sum("output_tokens"), count],
    ["Engines", new Set(nodes.map((node) => node.engine).filter(Boolean)).size, count],
    ["Failed", nodes.filter((node) => node.state === "failed").length, count],
  ];
}

function Figures({ graphs }) {
  for (const graph of graphs) graph.revision.value;
  if (graphs.some((graph) => graph.isRunning)) tick.value;
  const [a, b] = graphs.map(figuresOf);
  return html`<div class="panel compare-figures table-pane" tabindex="0" role="region" aria-label="Figures of both runs"><table>
    <thead><tr><th scope="col">Figure</th><th scope="col">A</th><th scope="col">B</th><th scope="col">B / A</th></tr></thead>
    <tbody>${a.map(([name, value, write], index) => html`<tr key=${name}>
      <th scope="row" class=${/^of /.test(name) ? "is-part" : ""}>${name}</th><td>${write(value)}</td><td>${write(b[index][1])}</td>
      <td>${value && b[index][1] != null ? (b[index][1] / value).toFixed(2) : UNKNOWN}</td>
    </tr>`)}</tbody>
  </table></div>`;
}
