/** The live list of sessions, beside the selected one. */

import { computed, html, signal, useEffect, useRef, useSignal } from "../../vendor/preact.js";
import { GATEWAY } from "../data/api.js";
import { connection, gateway, keyOf, models, sessions, sessionsChanged, tenants } from "../data/overview.js";
import { ago, compact, count, titleOf } from "../format.js";
import { slowTick } from "../parts/clock.js";
import { CopyBlock } from "../parts/copy.js";
import { Empty } from "../parts/empty.js";
import { StateMark } from "../parts/state_mark.js";
import { hrefOf } from "../route.js";
import { SessionPage } from "../session/session_page.js";

const ROW = 58;
/** Rows kept above and below the visible ones. */
const AROUND = 6;

const filter = signal("");
const only = signal("all");
const CHOICES = {
  all: () => true,
  active: (session) => session.state === "running" || session.state === "waiting",
  failed: (session) => session.failed > 0,
};

/** Newest first, an order in which rows do not jump while sessions run. */
const listed = computed(() => {
  sessionsChanged.value;
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const isWanted = CHOICES[only.value];
  const found = [];
  for (const session of sessions.values()) {
    if (!isWanted(session)) continue;
    if (words.length) {
      const text = [titleOf(session), session.name, session.id, session.tenant, session.state, ...(session.models ?? [])]
        .join(" ")
        .toLowerCase();
      if (!words.every((word) => text.includes(word))) continue;
    }
    found.push(session);
  }
  return found.sort((a, b) => b.started - a.started || (keyOf(a) < keyOf(b) ? -1 : 1));
});

/** True if the list and a session fit side by side. */
const isWide = matchMedia("(min-width: 821px)");
/** Key of the session shown until the user chooses one: the newest, as long as it exists. */
let followed = null;

function followedKey() {
  const [newest] = listed.value;
  if (!sessions.has(followed)) followed = newest ? keyOf(newest) : null;
  return isWide.matches ? followed : null;
}

export function Sessions({ id }) {
  const shown = id || followedKey();
  const isEmpty = connection.value === "live" && sessionsChanged.value > 0 && sessions.size === 0;
  return html`<div class=${`sessions${id ? " has-session" : ""}`}>
    ${!shown && html`<h1 class="unseen">Sessions</h1>`}
    <section class="session-list" aria-label="Sessions">
      <${Filter} />
      <${List} current=${shown} />
    </section>
    <div class="session-pane">
      ${shown && html`<${SessionPage} key=${shown} id=${shown} />`}
      ${!shown && (isEmpty ? html`<${FirstSteps} />` : html`<${Empty} title="Choose a session">
        <p>Its calls are drawn as they run: what feeds what, where each was placed, and why.</p>
      <//>`)}
    </div>
  </div>`;
}

function Filter() {
  const total = listed.value.length;
  return html`<div class="list-head">
    <input
      type="search"
      placeholder="Filter by name, id, model"
      aria-label="Filter sessions"
      value=${filter.value}
      onInput=${(event) => (filter.value = event.target.value)}
    />
    <div class="chips" role="group" aria-label="Which sessions">
      ${Object.keys(CHOICES).map((name) => html`<button
        key=${name} type="button" aria-pressed=${only.value === name ? "true" : "false"}
        onClick=${() => (only.value = name)}>${name}</button>`)}
      <span class="muted">${count(total)}</span>
    </div>
  </div>`;
}

/** Only the visible rows are elements. */
function List({ current }) {
  const pane = useRef(null);
  const top = useSignal(0);
  const height = useSignal(800);
  const cursor = useRef(null);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => (height.value = entry.contentRect.height));
    observer.observe(pane.current);
    return () => observer.disconnect();
  }, []);
  const all = listed.value;
  const first = Math.max(0, Math.floor(top.value / ROW) - AROUND);
  const shown = all.slice(first, first + Math.ceil(height.value / ROW) + 2 * AROUND);
  const reachable = shown.some((session) => keyOf(session) === current) ? current : keyOf(shown[0] ?? {});

  // Not `all`: a handler outlives the list it was made with.
  const onKeyDown = (event) => {
    const all = listed.peek();
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8, Home: -all.length, End: all.length }[event.key];
    if (!step) return;
    event.preventDefault();
    const from = all.findIndex((session) => keyOf(session) === event.target.dataset.key);
    const next = Math.min(all.length - 1, Math.max(0, from + step));
    if (!all[next]) return;
    const view = pane.current;
    const y = next * ROW;
    if (y < view.scrollTop) view.scrollTop = y;
    if (y + ROW > view.scrollTop + view.clientHeight) view.scrollTop = y + ROW - view.clientHeight;
    top.value = view.scrollTop;
    cursor.current = keyOf(all[next]);
    requestAnimationFrame(() => requestAnimationFrame(() => {
      pane.current?.querySelector(`[data-key="${CSS.escape(cursor.current)}"]`)?.focus({ preventScroll: true });
    }));
  };
  slowTick.value;
  const hasTenants = tenants.value.length > 1;
  return html`<div class="list-pane" ref=${pane} onScroll=${(event) => (top.value = event.target.scrollTop)}>
    ${all.length === 0 && html`<p class="list-none muted">${connection.value === "connecting" ? "Connecting…" : filter.value || only.value !== "all" ? "No session matches." : "No sessions yet."}</p>`}
    <ul style=${{ height: `${all.length * ROW}px` }} onKeyDown=${onKeyDown}>
      ${shown.map((session, index) => html`<${Row}
        key=${keyOf(session)}
        session=${session}
        place=${first + index}
        total=${all.length}
        isCurrent=${keyOf(session) === current}
        isReachable=${keyOf(session) === reachable}
        since=${ago(session.last_activity)}
        hasTenant=${hasTenants}
      />`)}
    </ul>
  </div>`;
}

function Row({ session, place, total, isCurrent, isReachable, since, hasTenant }) {
  const { state, calls, running, failed, tenant, inferred, models } = session;
  return html`<li style=${{ transform: `translateY(${place * ROW}px)` }} aria-setsize=${total} aria-posinset=${place + 1}>
    <a
      class="row"
      href=${hrefOf("sessions", keyOf(session))}
      data-key=${keyOf(session)}
      tabindex=${isReachable ? 0 : -1}
      aria-current=${isCurrent ? "page" : undefined}
    >
      <${StateMark} state=${state === "idle" && failed > 0 ? "failed" : state} />
      <span class=${`row-name${inferred ? " is-inferred" : ""}`} title=${session.name || session.id}><bdi>${titleOf(session)}</bdi></span>
      <span class="row-since">${since}</span>
      <span class="row-facts">
        <span>${compact(calls)} ${calls === 1 ? "call" : "calls"}</span>
        ${running > 0 && html`<span class="is-running">${running} running</span>`}
        ${failed > 0 && html`<span class="is-bad">${failed} failed</span>`}
        <span class="row-tenant">${hasTenant ? tenant : (models ?? []).join(", ")}</span>
        <span class="unseen">, ${state}</span>
      </span>
    </a>
  </li>`;
}

function FirstSteps() {
  const [model] = models.value;
  if (gateway.value && model === undefined) {
    return html`<${Empty} title="No model is served yet">
      <p>One may still be loading; <a href=${hrefOf("engines")}>Engines</a> shows which. Else start the gateway with one:</p>
      <${CopyBlock} text=${"parrot-gateway serve --model FOLDER_OR_ID\nparrot-gateway serve --upstream NAME=URL"} label="two ways to serve a model" />
    <//>`;
  }
  return html`<${Empty} title="Waiting for the first call">
    <p>Point any program that uses an OpenAI client here. Its calls show up as they come.</p>
    <${CopyBlock} text=${`export OPENAI_BASE_URL=${GATEWAY}/v1`} label="the address of this gateway" />
    <p>Or make one call:</p>
    <${CopyBlock} text=${firstCall(model)} label="a first call" />
    <p>Calls that feed one another are one session, whether the program says so or not. The <a href=${hrefOf("playground")}>playground</a> runs such a graph from here.</p>
  <//>`;
}

const firstCall = (model) => {
  const body = JSON.stringify({ model: nameOf(model), prompt: "Once upon a time", max_tokens: 60 });
  return `curl ${GATEWAY}/v1/completions -H 'Content-Type: application/json' \\\n  -d '${body.replaceAll("'", "'\\''")}'`;
};

const nameOf = (model) => (typeof model === "string" ? model : model?.id);
