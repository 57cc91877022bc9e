/** Everything about one call: tokens, times, place, links, and requests for it. */

import { html, useEffect, useSignal } from "../../vendor/preact.js";
import { requestJson } from "../data/api.js";
import { cachedShare, count, duration, engineName, percent } from "../format.js";
import { fullName } from "../graph/node_box.js";
import { tick } from "../parts/clock.js";
import { CopyBlock, CopyButton } from "../parts/copy.js";
import { StateMark } from "../parts/state_mark.js";
import { CallText, useCallText, VariableText } from "./call_text.js";
import { curlOfCall, curlOfRequest, curlToLookUp } from "./curl.js";

export function CallDetails({ graph, selected }) {
  graph.revision.value;
  const id = selected.value;
  const node = graph.nodes.get(id);
  const variable = node ? null : graph.variables.get(id);
  const close = () => (selected.value = null);
  return html`<aside class="details" aria-label="Details" onKeyDown=${(event) => event.key === "Escape" && close()}>
    <button type="button" class="icon close" onClick=${close} aria-label="Close details">×</button>
    ${node && html`<${Call} key=${id} ...${{ graph, node, selected }} />`}
    ${variable && html`<${Variable} ...${{ graph, variable, selected }} />`}
    ${!node && !variable && html`<p class="muted">This call is not in the graph.</p>`}
  </aside>`;
}

/** The call's record, fetched again once it has ended. */
function useRecord(node) {
  const record = useSignal(null);
  const isOver = node.finished_s !== null;
  useEffect(() => {
    if (node.kind === "transform") return undefined;
    const abort = new AbortController();
    requestJson(`/ui/api/calls/${encodeURIComponent(node.id)}`, { signal: abort.signal })
      .then((found) => (record.value = found))
      // The graph's own facts are shown all the same.
      .catch(() => {});
    return () => abort.abort();
  }, [node.id, isOver]);
  return record.value;
}

function Call({ graph, node, selected }) {
  const record = useRecord(node);
  const text = useCallText(graph, node);
  const explanation = record?.explanation?.text ?? node.explanation;
  return html`
    <h2><${StateMark} state=${node.state} /><span>${node.name}</span></h2>
    <p class="muted">
      ${node.kind === "transform" ? "transform" : (record?.path ?? "call")} · ${node.state}
      ${record?.status ? ` · status ${record.status}` : ""}
      ${record?.finish_reason ? ` · finished by ${record.finish_reason}` : ""}
    </p>
    ${node.failure && html`<p class="failure" role="note">${record?.error_message ?? node.failure}</p>`}
    ${node.kind === "transform" && html`<${CopyBlock} text=${node.transform} label="pipeline" />`}
    ${node.kind !== "transform" && html`<${Tokens} of=${record?.prompt_tokens == null ? node : record} />`}
    <${Times} graph=${graph} node=${node} />
    ${node.kind !== "transform" && html`<section>
      <h3>Placement</h3>
      ${explanation ? html`<p>${explanation}</p>` : html`<p class="muted">${node.engine ? "No reason is known." : "Not placed yet."}</p>`}
      <dl class="pairs">
        <${Pair} name="Engine">${node.engine}<//>
        <${Pair} name="Model">${node.model}<//>
        <${Pair} name="Decided by">${record?.explanation?.decided_by ?? node.placement}<//>
        <${Pair} name="Objective">${node.objective}<//>
        <${Pair} name="Group">${node.group}<//>
        <${Pair} name="Priority">${node.priority || null}<//>
      </dl>
      <${Alternatives} of=${record?.explanation?.alternatives} />
    </section>`}
    <${Flow} ...${{ graph, node, selected }} />
    <${CallText} text=${text} />
    <${Links} ...${{ graph, node, selected, record }} />
    ${node.kind !== "transform" && html`<section>
      <h3>Requests</h3>
      ${text?.request
        ? html`<p class="muted">This request, its keys left out:</p>
          <${CopyBlock} text=${curlOfRequest(text, graph)} label="curl of this request" />`
        : html`<p class="muted">${text?.source === "kept" ? "This request is too long to be kept whole." : "This request is not kept."} One like it, without its prompt:</p>
          <${CopyBlock} text=${curlOfCall(node, graph, record)} label="curl of a call like this one" />`}
      <p class="muted">What the gateway knows of it:</p>
      <${CopyBlock} text=${curlToLookUp(node)} label="curl that looks it up" />
    </section>`}
    <dl class="pairs ids">
      <${Id} name="Call" value=${node.id} />
      <${Id} name="Request" value=${record?.request_id} />
      <${Id} name="Run" value=${node.run} />
      <${Id} name="Parent" value=${node.parent} />
    </dl>`;
}

const Pair = ({ name, children }) =>
  children == null || children === "" ? null : html`<div><dt>${name}</dt><dd>${children}</dd></div>`;

const Id = ({ name, value }) =>
  value ? html`<div><dt>${name}</dt><dd><code>${value}</code><${CopyButton} text=${value} label=${`Copy the id of the ${name.toLowerCase()}`} /></dd></div>` : null;

function Tokens({ of }) {
  const share = cachedShare(of);
  return html`<section>
    <h3>Tokens</h3>
    <div class="tokens">
      <div><b>${count(of.prompt_tokens)}</b> prompt</div>
      <div><b>${count(of.cached_tokens)}</b> cached${share === null ? "" : `, ${percent(share)}`}</div>
      <div><b>${count(of.output_tokens ?? of.tokens)}</b> output</div>
    </div>
    ${share !== null && html`<div class="meter" role="img" aria-label=${`${percent(share)} of the prompt was cached`}>
      <span style=${{ width: `${share * 100}%` }}></span>
    </div>`}
  </section>`;
}

/** Waiting for inputs, queued, filling, generating: widths by share of time. */
function Times({ graph, node }) {
  graph.revision.value;
  if (node.finished_s === null) tick.value;
  const now = graph.now;
  const end = node.finished_s ?? now;
  let ready = node.submitted_s;
  for (const id of node.inputs) {
    const producer = graph.nodes.get(graph.variables.get(id)?.producer);
    if (producer) ready = Math.max(ready, producer.finished_s ?? end);
  }
  const started = node.started_s ?? end;
  ready = Math.min(ready, started);
  const first = node.first_token_s ?? (node.finished_s === null ? end : started);
  const parts = [
    ["inputs", "for inputs", ready - node.submitted_s],
    ["queue", "queued", started - ready],
    ["fill", "fill", node.started_s === null ? 0 : Math.max(0, first - started)],
    ["generate", "generate", node.started_s === null ? 0 : Math.max(0, end - Math.max(first, started))],
  ].filter(([, , seconds]) => seconds > 0.0005);
  const total = parts.reduce((sum, [, , seconds]) => sum + seconds, 0);
  return html`<section>
    <h3>Time <b>${duration(total)}</b></h3>
    <div class="stack" aria-hidden="true">
      ${parts.map(([kind, , seconds]) => html`<span key=${kind} class=${`part-${kind}`} style=${{ flexGrow: seconds / (total || 1) }}></span>`)}
    </div>
    <dl class="legend">
      ${parts.map(([kind, name, seconds]) => html`<div key=${kind}><dt><i class=${`part-${kind}`}></i>${name}</dt><dd>${duration(seconds)}</dd></div>`)}
    </dl>
  </section>`;
}

function Alternatives({ of }) {
  if (!of || of.length < 2) return null;
  return html`<table class="small">
    <caption>Engines at that moment</caption>
    <thead><tr><th scope="col">engine</th><th scope="col">cached</th><th scope="col">batch</th><th scope="col">expected</th><th scope="col">room</th></tr></thead>
    <tbody>
      ${of.map((each, index) => html`<tr key=${each.engine} class=${index === 0 ? "is-chosen" : ""}>
        <th scope="row">${engineName(each.engine)}</th><td>${count(each.cached_tokens)}</td><td>${count(each.running)}</td>
        <td>${duration(each.predicted_s)}</td><td>${each.has_room ? "yes" : "no"}</td>
      </tr>`)}
    </tbody>
  </table>`;
}

/** The variables it reads and writes, each with a link to the call on the other side. */
function Flow({ graph, node, selected }) {
  graph.revision.value;
  const reads = node.inputs.map((id) => graph.variables.get(id)).filter(Boolean);
  const written = graph.variables.get(node.output);
  if (!reads.length && !written) return null;
  const go = (id, text) =>
    html`<button type="button" class="link" key=${id} onClick=${() => (selected.value = id)}>${text}</button>`;
  const name = (id) => graph.nodes.get(id)?.name ?? id;
  return html`<section>
    <h3>Variables</h3>
    <ul class="flow">
      ${reads.map((each) => html`<li key=${each.id}><span class="muted">reads</span> <${StateMark} state=${each.state} />${fullName(each)}
        ${graph.nodes.has(each.producer) && html` <span class="muted">of</span> ${go(each.producer, name(each.producer))}`}</li>`)}
      ${written && html`<li><span class="muted">writes</span> <${StateMark} state=${written.state} />${fullName(written)}
        ${written.consumers.length > 0 && html` <span class="muted">for</span> ${written.consumers.slice(0, 12).map((id) => go(id, name(id)))}${written.consumers.length > 12 ? ` and ${written.consumers.length - 12} more` : ""}`}</li>`}
    </ul>
  </section>`;
}

function Links({ graph, node, selected, record }) {
  graph.structure.value;
  const known = record?.links?.length ? record.links : [...graph.links.values()].filter((link) => link.to === node.id);
  if (!known.length) return null;
  return html`<section>
    <h3>Inferred links</h3>
    <ul class="flow">
      ${known.map((link) => html`<li key=${`${link.from} ${link.kind}`}>
        ${LINK_WORDS[link.kind] ?? link.kind}${" "}
        ${graph.nodes.has(link.from)
          ? html`<button type="button" class="link" onClick=${() => (selected.value = link.from)}>${graph.nodes.get(link.from).name}</button>`
          : html`<code>${link.from}</code>`}
        <span class="muted"> confidence ${link.confidence.toFixed(2)}${evidence(link.evidence)}</span>
      </li>`)}
    </ul>
  </section>`;
}

const LINK_WORDS = {
  continues: "continues",
  output: "quotes the answer of",
  tool: "brings a tool's result to",
  spawned: "was spawned by",
};

/** Position of the passage; the gateway gives positions without text. */
function evidence(found) {
  if (!found || typeof found !== "object") return "";
  const { message, start, end } = found;
  const where = message == null ? "" : ` in message ${message}`;
  return start == null || end == null ? where && `,${where}` : `, characters ${count(start)} to ${count(end)}${where}`;
}

function Variable({ graph, variable, selected }) {
  const readers = variable.consumers.filter((id) => graph.nodes.has(id));
  return html`
    <h2><${StateMark} state=${variable.state} /><span>${fullName(variable)}</span></h2>
    <p class="muted">variable · ${variable.state}${variable.size_bytes ? ` · ${count(variable.size_bytes)} bytes` : ""}</p>
    <${ValueOf} ...${{ graph, variable }} />
    <section><h3>Read by</h3><ul class="flow">${readers.slice(0, 40).map((id) => html`<li key=${id}>
      <button type="button" class="link" onClick=${() => (selected.value = id)}>${graph.nodes.get(id).name}</button></li>`)}
      ${readers.length > 40 && html`<li class="muted">and ${readers.length - 40} more</li>`}</ul></section>
    <dl class="pairs ids"><${Id} name="Variable" value=${variable.id} /></dl>`;
}

/** The value, fetched whenever the variable's state has changed. */
function ValueOf({ graph, variable }) {
  const found = useSignal(null);
  useEffect(() => {
    if (graph.isInferred) return undefined;
    const abort = new AbortController();
    const [session, id] = [graph.session.id, variable.id].map(encodeURIComponent);
    requestJson(`/ui/api/sessions/${session}/variables/${id}`, { signal: abort.signal })
      .then((value) => (found.value = value))
      .catch((error) => {
        if (!abort.signal.aborted) found.value = { why: error.message };
      });
    return () => abort.abort();
  }, [variable.id, variable.state]);
  return found.value && html`<section class="call-text"><h3>Text</h3><${VariableText} variable=${found.value} /></section>`;
}
