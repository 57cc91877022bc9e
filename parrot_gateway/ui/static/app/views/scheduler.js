/** Waiting calls, held applications with reasons, and the rules that placed calls. */

import { html } from "../../vendor/preact.js";
import { scheduler } from "../data/overview.js";
import { count, duration, percent, UNKNOWN } from "../format.js";
import { slowTick } from "../parts/clock.js";
import { Empty } from "../parts/empty.js";

export function Scheduler() {
  const view = scheduler.value;
  slowTick.value;
  if (!view) return html`<${Empty} title="Nothing is known of the scheduler yet" />`;
  const policies = Object.entries(view.policies ?? { place: view.policy });
  return html`<div class="page is-narrow">
    <h1 class="unseen">Scheduler</h1>
    <dl class="facts">
      <div><dt>Calls placed</dt><dd>${count(view.decisions)}</dd></div>
      <div><dt>Waiting</dt><dd>${count(view.queues.reduce((sum, queue) => sum + queue.waiting, 0))}</dd></div>
      <div><dt>Applications held</dt><dd>${count(view.held.length)}</dd></div>
      ${policies.map(([kind, name]) => html`<div key=${kind}><dt>${POLICY_WORDS[kind] ?? kind}</dt><dd>${name}</dd></div>`)}
    </dl>
    <${Queues} of=${view.queues} />
    <${Held} of=${view.held} />
    <${Placements} of=${view.placements} />
  </div>`;
}

const POLICY_WORDS = { admission: "Admission", order: "Order", place: "Placement", keep: "Retention" };

const Queues = ({ of }) => html`<section class="panel">
  <h2>Queues</h2>
  ${of.length === 0
    ? html`<p class="muted">No model of own engines is served.</p>`
    : html`<div class="table-pane" tabindex="0" role="region" aria-label="Queues"><table>
        <thead><tr><th scope="col">Model</th><th scope="col">Waiting</th><th scope="col">Held</th><th scope="col">Oldest wait</th></tr></thead>
        <tbody>${of.map((queue) => html`<tr key=${queue.model}>
          <th scope="row">${queue.model}</th><td>${count(queue.waiting)}</td><td>${count(queue.held)}</td>
          <td>${queue.waiting ? duration(queue.oldest_s) : UNKNOWN}</td>
        </tr>`)}</tbody>
      </table></div>`}
</section>`;

const Held = ({ of }) => html`<section class="panel">
  <h2>Held applications</h2>
  ${of.length === 0
    ? html`<p class="muted">None: the contexts of all running applications fit into the engines' memory.</p>`
    : html`<div class="table-pane" tabindex="0" role="region" aria-label="Held applications"><table>
        <thead><tr><th scope="col">Application</th><th scope="col">Model</th><th scope="col">Held for</th><th scope="col">Calls</th><th scope="col" class="is-text">Why</th></tr></thead>
        <tbody>${of.map((each) => html`<tr key=${`${each.model} ${each.application}`}>
          <th scope="row">${each.application}</th><td>${each.model ?? UNKNOWN}</td>
          <td>${duration(Date.now() / 1000 - each.since)}</td><td>${count(each.tasks)}</td><td class="is-text">${each.why}</td>
        </tr>`)}</tbody>
      </table></div>`}
</section>`;

/** Explanations of deciding rules; the gateway's own word follows. */
const REASONS = {
  only: "the only engine that could take it",
  load: "least work there",
  prefix: "more of its prompt is cached there",
  bound: "what it goes on from is there",
  session: "its session runs there",
  group: "its task group is kept together",
  preferred: "what it reads was written or filled there",
  replicate: "engines that have its prefix were too busy",
  starved: "an engine was kept free for it",
  turn: "it was that engine's turn",
  upstream: "passed on to an upstream",
};

function Placements({ of }) {
  const reasons = Object.entries(of ?? {}).sort((a, b) => b[1] - a[1]);
  if (!reasons.length) return null;
  const all = reasons.reduce((sum, [, number]) => sum + number, 0);
  return html`<section class="panel">
    <h2>Why calls went where they did</h2>
    <ul class="bars">${reasons.map(([reason, number]) => html`<li key=${reason}>
      <span class="bars-name">${reason}${REASONS[reason] && html`<small class="muted"> ${REASONS[reason]}</small>`}</span>
      <span class="meter" aria-hidden="true"><span style=${{ width: `${(number / all) * 100}%` }}></span></span>
      <span class="bars-count">${count(number)} <small class="muted">${percent(number / all)}</small></span>
    </li>`)}</ul>
  </section>`;
}
