/** One session: its graph beside its timeline, and the details of a call. */

import { effect, html, useEffect, useMemo, useSignal } from "../../vendor/preact.js";
import { connection, keyOf, sessions, sessionsChanged, tenants } from "../data/overview.js";
import { SessionGraph } from "../data/session_graph.js";
import { clockTime, count, duration, percent, plural, titleOf } from "../format.js";
import { GraphView } from "../graph/graph_view.js";
import { tick } from "../parts/clock.js";
import { CopyButton } from "../parts/copy.js";
import { Empty } from "../parts/empty.js";
import { LiveRegion } from "../parts/live_region.js";
import { StateMark } from "../parts/state_mark.js";
import { hrefOf, replaceQuery, route } from "../route.js";
import { CallDetails } from "./call_details.js";
import { Timeline } from "./timeline.js";

export function SessionPage({ id }) {
  const graph = useMemo(() => new SessionGraph(id), [id]);
  const at = useSignal(null);
  const selected = useSignal(route.peek().query.get("call"));
  const showsPath = useSignal(true);

  useEffect(() => () => graph.close(), [graph]);
  useEffect(() => {
    // A selection in another session is not valid in this one.
    let isFirst = true;
    return effect(() => {
      const call = selected.value;
      if (!isFirst && route.peek().id === id) replaceQuery(call === null ? {} : { call });
      isFirst = false;
    });
  }, [id]);

  if (graph.connection.value === "refused") {
    return html`<${Empty} title="This session cannot be shown">
      <p>${graph.error.value?.message}</p>
      <p><a href=${hrefOf("sessions")}>All sessions</a></p>
    <//>`;
  }
  graph.structure.value;
  if (graph.connection.value === "connecting" && graph.nodes.size === 0) {
    return html`<div class="session is-loading" aria-busy="true"></div>`;
  }
  const shared = { graph, at, selected, showsPath };
  const onKeyDown = (event) => {
    if (event.key === "Escape" && selected.value !== null) selected.value = null;
  };
  return html`<article class=${`session${selected.value ? " has-details" : ""}`} onKeyDown=${onKeyDown}>
    <${Head} graph=${graph} />
    <div class="session-graph"><${GraphView} key=${id} ...${shared} /></div>
    ${selected.value && html`<${CallDetails} graph=${graph} selected=${selected} />`}
    <div class="session-timeline"><${Timeline} key=${id} ...${shared} /></div>
    <${Announcer} graph=${graph} />
  </article>`;
}

function viewOf(graph) {
  sessionsChanged.value;
  const known = sessions.get(graph.id);
  if (known) return known;
  for (const session of sessions.values()) if (keyOf(session) === graph.session.id) return session;
  return null;
}

function Head({ graph }) {
  graph.revision.value;
  const view = viewOf(graph);
  const nodes = [...graph.nodes.values()];
  const in_ = (state) => nodes.filter((node) => node.state === state).length;
  const sum = (field) => nodes.reduce((total, node) => total + (node[field] ?? 0), 0);
  const [prompt, cached] = [sum("prompt_tokens"), sum("cached_tokens")];
  const state = in_("running") ? "running" : in_("waiting") ? "waiting" : (view?.state ?? "idle");
  const depth = Math.max(0, ...nodes.map((node) => node.stage + 1));
  return html`<header class="session-head">
    <div class="session-title">
      <a class="back" href=${hrefOf("sessions")} aria-label="All sessions">‹</a>
      <h1 title=${graph.session.name || graph.session.id}><bdi>${titleOf(view ?? graph.session)}</bdi></h1>
      <span class=${`badge is-${state}`}><${StateMark} state=${state} />${state}</span>
      ${graph.isInferred && html`<span class="badge is-inferred" title="Nobody named this session: it was inferred from what its calls say">inferred</span>`}
      ${tenants.value.length > 1 && view?.tenant && html`<span class="badge is-quiet" title="Tenant">${view.tenant}</span>`}
      <span class="session-id"><code>${graph.session.id}</code><${CopyButton} text=${graph.session.id} label="Copy the id of the session" /></span>
      <a class="compare-link" href=${hrefOf("compare", null, { a: graph.id })}>Compare</a>
      ${graph.connection.value === "lost" && connection.value !== "lost" && html`<span class="badge is-lost">connection lost, trying again</span>`}
    </div>
    <div class="facts-pane" tabindex="0" role="region" aria-label="Figures of the session"><dl class="facts">
      <${Fact} name="Calls">${count(nodes.length)}${graph.notKept > 0 && html`<small> + ${count(graph.notKept)} not kept</small>`}<//>
      <${Fact} name="Running">${count(in_("running"))}<//>
      <${Fact} name="Waiting">${count(in_("waiting"))}<//>
      <${Fact} name="Failed" isBad=${in_("failed") > 0}>${count(in_("failed"))}<//>
      <${Fact} name="Depth">${plural(depth, "stage")}<//>
      ${view && html`<${Fact} name="Started"><time datetime=${new Date(view.started * 1000).toISOString()}>${clockTime(view.started)}</time><//>`}
      <${Fact} name="Time"><${Clock} graph=${graph} /><//>
      <${Fact} name="Prompt tokens">${count(prompt || view?.prompt_tokens)}<//>
      <${Fact} name="Cached">${percent(prompt ? cached / prompt : null)}<//>
      <${Fact} name="Output tokens">${count(sum("output_tokens") || sum("tokens"))}<//>
    </dl></div>
  </header>`;
}

const Fact = ({ name, isBad, children }) =>
  html`<div class=${isBad ? "is-bad" : ""}><dt>${name}</dt><dd>${children}</dd></div>`;

function Clock({ graph }) {
  graph.revision.value;
  if (graph.isRunning) tick.value;
  return html`${duration(graph.now)}`;
}

/** Tells a screen reader occasionally how far the session is. */
function Announcer({ graph }) {
  graph.revision.value;
  const nodes = [...graph.nodes.values()];
  const done = nodes.filter((node) => node.finished_s !== null).length;
  const failed = nodes.filter((node) => node.state === "failed").length;
  const text = `${done} of ${plural(nodes.length, "call")} ended${failed ? `, ${failed} failed` : ""}`;
  return html`<${LiveRegion} text=${text} />`;
}
