/** Write a small graph of calls, run it, watch it, and export it as a program. */

import { effect, html, signal, useEffect, useMemo, useSignal } from "../../vendor/preact.js";
import { models } from "../data/overview.js";
import { SessionGraph } from "../data/session_graph.js";
import { GraphView } from "../graph/graph_view.js";
import { CopyBlock } from "../parts/copy.js";
import {
  addStep, asGraph, draft, faultsOf, MAX_STEPS, readsOf, removeStep, SAMPLES, update, updateStep,
} from "../playground/draft.js";
import { asCurl, asLangChain, asPython } from "../playground/requests.js";
import { runs, start } from "../playground/runs.js";
import { hrefOf } from "../route.js";
import { Timeline } from "../session/timeline.js";

const TABS = { texts: "Texts", timeline: "Timeline", python: "Python", langchain: "LangChain", curl: "curl" };
const tab = signal("texts");
/** The kind of run that is shown; null shows the draft. */
const shown = signal(null);

const nameOf = (model) => (typeof model === "string" ? model : model.id);

export function Playground() {
  const { steps, model } = draft.value;
  const names = models.value.map(nameOf);
  useEffect(() => {
    if (!model && names.length) update({ model: names[0] });
  }, [names[0]]);
  const faults = faultsOf(steps);
  const run = shown.value ? runs.value[shown.value] : null;
  return html`<div class="playground">
    <h1 class="unseen">Playground</h1>
    <${Editor} names=${names} faults=${faults} />
    <section class="play" aria-label="Run">
      <${Picture} run=${run} faults=${faults} />
      <${Output} run=${run} />
    </section>
  </div>`;
}

function Editor({ names, faults }) {
  const { steps, model, isChat } = draft.value;
  const isRunning = Object.values(runs.value).some((run) => !run.isOver.value);
  const canRun = faults.size === 0 && Boolean(model) && !isRunning && steps.some((each) => each.kind === "call");
  const begin = (kind) => {
    start(kind, draft.value);
    shown.value = kind;
    tab.value = "texts";
  };
  // An edit shows the draft again.
  const edited = (work) => (event) => {
    shown.value = null;
    work(event);
  };
  return html`<section class="editor" aria-label="Calls">
    <div class="editor-head">
      <label>Model
        <select value=${model} onChange=${(event) => update({ model: event.target.value })}>
          ${names.length === 0 && html`<option value="">none is served yet</option>`}
          ${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select>
      </label>
      <label>As
        <select value=${isChat ? "chat" : "text"} onChange=${(event) => update({ isChat: event.target.value === "chat" })}>
          <option value="text">text</option><option value="chat">chat</option>
        </select>
      </label>
      <label>Begin with
        <select value="" onChange=${edited((event) => event.target.value && update({ steps: SAMPLES[event.target.value]() }))}>
          <option value="">a sample…</option>
          ${Object.keys(SAMPLES).map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select>
      </label>
    </div>
    <ol class="steps">${steps.map((each) => html`<${Step} key=${each.id} step=${each} fault=${faults.get(each.id)} edited=${edited} />`)}</ol>
    <div class="editor-buttons">
      <button type="button" disabled=${steps.length >= MAX_STEPS} onClick=${edited(() => addStep("call"))}>Add a call</button>
      <button type="button" disabled=${steps.length >= MAX_STEPS} onClick=${edited(() => addStep("text"))}>Add a text</button>
    </div>
    <div class="editor-run">
      <button type="button" class="primary" disabled=${!canRun} onClick=${() => begin("graph")}>Run with its graph</button>
      <button type="button" disabled=${!canRun} onClick=${() => begin("calls")}>Run call by call</button>
      <p class="muted">With its graph all calls are submitted at once, and texts flow inside the gateway. Call by call this page waits for each text and sends it on, as a plain client does.</p>
    </div>
  </section>`;
}

function Step({ step, fault, edited }) {
  const { id, kind, name, text, maxTokens } = step;
  const reads = readsOf(step);
  const fieldId = `step-${id}`;
  return html`<li class=${`step is-${kind}`}>
    <div class="step-head">
      <span class="muted">${kind}</span>
      <input aria-label=${`Name of this ${kind}`} value=${name} spellcheck=${false} onInput=${edited((event) => updateStep(id, { name: event.target.value.trim() }))} />
      ${kind === "call" && html`<label>up to <input type="number" min="1" max="4096" value=${maxTokens} onInput=${edited((event) => updateStep(id, { maxTokens: Math.max(1, Number(event.target.value) || 1) }))} /> tokens</label>`}
      <button type="button" class="icon" aria-label=${`Remove ${name}`} onClick=${edited(() => removeStep(id))}>×</button>
    </div>
    <textarea
      id=${fieldId}
      rows=${Math.min(7, Math.max(2, Math.ceil(text.length / 42)))}
      aria-label=${kind === "call" ? `Prompt of ${name}` : `Text of ${name}`}
      aria-describedby=${`${fieldId}-note`}
      placeholder=${kind === "call" ? "A prompt; {{name}} stands for another's text" : "A text that prompts use as {{name}}"}
      value=${text}
      onInput=${edited((event) => updateStep(id, { text: event.target.value }))}
    ></textarea>
    <p id=${`${fieldId}-note`} class=${fault ? "is-bad" : "muted"}>${fault ?? (reads.length ? `reads ${reads.join(", ")}` : "")}</p>
  </li>`;
}

/** The running session, or before that the draft's graph. */
function Picture({ run, faults }) {
  const graph = useMemo(() => new SessionGraph(run?.session.value ?? null), [run, run?.session.value]);
  const at = useMemo(() => signal(null), [graph]);
  const selected = useMemo(() => signal(null), [graph]);
  const showsPath = useSignal(Boolean(run));
  useEffect(() => () => graph.close(), [graph]);
  useEffect(() => {
    if (graph.id !== null) return undefined;
    return effect(() => graph.show(asGraph(draft.value.steps)));
  }, [graph]);
  useEffect(() => {
    showsPath.value = graph.id !== null;
  }, [graph]);
  const key = graph.id ?? "draft";
  const hasTimeline = tab.value === "timeline" && graph.id !== null;
  return html`
    <div class="play-head">
      <h2>${run ? (run.kind === "graph" ? "With its graph" : "Call by call") : "As written"}</h2>
      ${run?.session.value && html`<a href=${hrefOf("sessions", run.session.value)}>Open as a session</a>`}
      <${CompareLink} />
      ${faults.size > 0 && html`<span class="is-bad">${faults.size === 1 ? "One step is not complete" : `${faults.size} steps are not complete`}</span>`}
    </div>
    <div class="play-graph"><${GraphView} key=${key} ...${{ graph, at, selected, showsPath }} /></div>
    ${hasTimeline && html`<div class="play-timeline"><${Timeline} key=${key} ...${{ graph, at, selected, showsPath }} /></div>`}`;
}

function CompareLink() {
  const { graph, calls } = runs.value;
  if (!graph?.session.value || !calls?.session.value) return null;
  return html`<a href=${hrefOf("compare", null, { a: calls.session.value, b: graph.session.value })}>Compare both runs</a>`;
}

function Output({ run }) {
  const code = { python: asPython, langchain: asLangChain, curl: asCurl }[tab.value];
  return html`<div class="play-output">
    <div class="tabs" role="tablist" aria-label="Output" onKeyDown=${turnTabs}>
      ${Object.entries(TABS).map(([name, title]) => html`<button
        key=${name} type="button" role="tab" id=${`tab-${name}`} aria-controls="tab-panel"
        aria-selected=${tab.value === name ? "true" : "false"} tabindex=${tab.value === name ? 0 : -1}
        onClick=${() => (tab.value = name)}>${title}</button>`)}
    </div>
    <div id="tab-panel" class="tab-panel" role="tabpanel" aria-labelledby=${`tab-${tab.value}`} tabindex="0">
      ${code && html`<${CopyBlock} text=${code(draft.value)} label=${TABS[tab.value]} />`}
      ${tab.value === "texts" && html`<${Texts} run=${run} />`}
      ${tab.value === "timeline" && !run?.session.value && html`<p class="muted">Run it first.</p>`}
    </div>
  </div>`;
}

function turnTabs(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const names = Object.keys(TABS);
  tab.value = names[(names.indexOf(tab.value) + step + names.length) % names.length];
  document.getElementById(`tab-${tab.value}`).focus();
}

function Texts({ run }) {
  if (!run) return html`<p class="muted">Texts appear here as they are written.</p>`;
  return html`
    ${run.error.value && html`<p class="failure" role="alert">${run.error.value}</p>`}
    <dl class="texts">${[...run.texts].map(([name, text]) => html`<div key=${name}>
      <dt>${name}</dt><dd>${text.value || html`<span class="muted">${run.isOver.value ? "no text" : "…"}</span>`}</dd>
    </div>`)}</dl>`;
}
