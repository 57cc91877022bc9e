/** One call, transform or variable in the graph. */

import { html } from "../../vendor/preact.js";
import { cachedShare, count, duration, shortEngineName, percent } from "../format.js";
import { tick } from "../parts/clock.js";
import { memo } from "../parts/memo.js";
import { StateMark } from "../parts/state_mark.js";
import { sizeOf } from "./sizes.js";

/** How long a call has been in its state at a moment (null: now). */
export function timeInState(node, state, at, now) {
  const end = at ?? now;
  if (state === "waiting") return end - node.submitted_s;
  if (state === "running") return end - node.started_s;
  if (node.started_s === null) return node.finished_s === null ? null : node.finished_s - node.submitted_s;
  return node.finished_s === null ? null : node.finished_s - node.started_s;
}

function Elapsed({ node, state, at, graph }) {
  if (at === null && (state === "running" || state === "waiting")) tick.value;
  return html`<span>${duration(timeInState(node, state, at, graph.now))}</span>`;
}

function Facts({ node, state, at, graph }) {
  if (state === "absent") return html`<span class="node-facts">not yet submitted</span>`;
  if (node.maxTokens) return html`<span class="node-facts">up to ${count(node.maxTokens)} tokens</span>`;
  if (node.kind === "transform") return html`<span class="node-facts">${node.transform}</span>`;
  if (state === "failed") {
    return html`<span class="node-facts is-bad" title=${node.failure}>${node.failure ?? "failed"}</span>`;
  }
  const word = state === "done" ? "" : `${state} `;
  const tokens = state === "done" ? (node.output_tokens ?? node.tokens) : 0;
  return html`<span class="node-facts">
    <b>${word}<${Elapsed} ...${{ node, state, at, graph }} /></b>
    ${graph.hasSeveralEngines && node.engine && state !== "waiting" && html`<span class="node-where">${shortEngineName(node.engine)}</span>`}
    ${tokens > 0 && html`<span>${count(tokens)} tok</span>`}
  </span>`;
}

/** Text for screen readers between a node's name and its visible content. */
function describeNode(node, state) {
  const parts = [node.kind, state];
  if (node.cached_tokens) {
    parts.push(`${count(node.cached_tokens)} of ${count(node.prompt_tokens)} prompt tokens cached`);
  }
  if (node.group) parts.push(`in group ${node.group}`);
  return parts.join(", ");
}

export const fullName = (variable) =>
  variable.session ? `${variable.session}/${variable.name}` : variable.name;

const nameOf = (node) => (node.kind === "variable" ? fullName(node) : node.name);

export const NodeBox = memo(({ node, state, x, y, at, graph, isSelected, isCursor, isCritical }) => {
  const { width, height } = sizeOf(node);
  const classes = ["node", `is-${state}`, `kind-${node.kind}`];
  if (isSelected) classes.push("is-selected");
  if (isCritical) classes.push("is-critical");
  const share = state === "absent" || state === "waiting" ? null : cachedShare(node);
  return html`<div
    class=${classes.join(" ")}
    role="button"
    tabindex=${isCursor ? 0 : -1}
    data-id=${node.id}
    aria-pressed=${isSelected ? "true" : "false"}
    style=${{ transform: `translate(${x}px, ${y}px)`, width: `${width}px`, height: `${height}px` }}
  >
    <span class="node-title">
      <${StateMark} state=${state} />
      <span class="node-name" title=${nameOf(node)}><bdi>${nameOf(node)}</bdi></span>
      ${node.tools?.length > 0 && state !== "absent" &&
      html`<span class="node-tools" title=${`calls ${node.tools.join(", ")}`}>⚒ ${node.tools.length}</span>`}
    </span>
    <span class="unseen">${describeNode(node, state)}</span>
    ${node.kind !== "variable" && html`<${Facts} ...${{ node, state, at, graph }} />`}
    ${share !== null &&
    html`<span class="node-cache" title=${`${percent(share)} of its prompt was cached`}>
      <span style=${{ width: `${share * 100}%` }}></span>
    </span>`}
  </div>`;
});
