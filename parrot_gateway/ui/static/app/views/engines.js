/** Engines and upstreams: their current work and memory use. */

import { html, useSignal } from "../../vendor/preact.js";
import { request } from "../data/api.js";
import { connection, engines, gateway, histories, historyChanged } from "../data/overview.js";
import { compact, count, engineName, percent, UNKNOWN } from "../format.js";
import { Chart } from "../parts/chart.js";
import { Empty } from "../parts/empty.js";
import { StateMark } from "../parts/state_mark.js";

/** Shared prefixes shown per engine. */
const MAX_PREFIXES = 4;

export function Engines() {
  const all = engines.value;
  if (!all.length) {
    return html`<${Empty} title=${connection.value === "live" ? "No engine has joined" : "Connecting"}>
      ${connection.value === "live" && html`<p>Engines join by themselves once their models are loaded.</p>`}
    <//>`;
  }
  const own = all.filter((engine) => engine.kind !== "upstream");
  const upstreams = all.filter((engine) => engine.kind === "upstream");
  return html`<div class="page">
    <h1 class="unseen">Engines</h1>
    ${own.length > 0 && html`<section aria-label="Engines" class="cards">${own.map((engine) => html`<${Engine} key=${engine.id} engine=${engine} />`)}</section>`}
    ${upstreams.length > 0 && html`<p class="cards-title">Upstreams</p>
    <section aria-label="Upstreams" class="cards is-small">${upstreams.map((engine) => html`<${Engine} key=${engine.id} engine=${engine} />`)}</section>`}
  </div>`;
}

function Engine({ engine }) {
  historyChanged.value;
  const history = histories.get(engine.id);
  const isOwn = engine.kind !== "upstream" && engine.state !== "loading";
  return html`<article class="card" aria-label=${engine.name}>
    <header>
      <h2 title=${engine.name}>${engineName(engine.name)}</h2>
      <span class=${`badge is-${engine.state}`}><${StateMark} state=${engine.state} />${engine.state}</span>
      <${Drain} engine=${engine} />
    </header>
    <p class="muted card-where">${[engine.model, engine.kind, engine.device].filter(Boolean).join(" · ")}</p>
    <dl class="facts">
      <${Figure} name="Running" of=${engine.max_batch_size ? ` / ${count(engine.max_batch_size)}` : ""}>${count(engine.running)}<//>
      <${Figure} name="Waiting">${count(engine.waiting)}<//>
      ${isOwn && html`
        <${Figure} name="Prefix hits">${percent(engine.prefix_hit_rate)}<//>
        <${Figure} name="Step">${engine.step_ms == null ? UNKNOWN : `${engine.step_ms.toFixed(1)} ms`}<//>
        <${Figure} name="Tokens/s">${engine.tokens_per_s == null ? UNKNOWN : compact(Math.round(engine.tokens_per_s))}<//>`}
    </dl>
    ${isOwn && html`<${KvCache} engine=${engine} />`}
    ${history && html`<div class="charts">
      <${Chart} title="calls" history=${history} label=${`Running and waiting calls of ${engine.name} over the last minutes`}
        series=${[{ name: "running", colour: "running", text: "running" }, { name: "waiting", colour: "queue", text: "waiting" }]} />
      ${isOwn && html`
        <${Chart} title="tokens/s" history=${history} label=${`Generated tokens a second of ${engine.name}`} series=${[{ name: "tokens_per_s", colour: "generate" }]} />
        <${Chart} title="step, ms" history=${history} label=${`Step time of ${engine.name} in milliseconds`} series=${[{ name: "step_ms", colour: "fill" }]} />
        <${Chart} title="%" most=${100} history=${history} label=${`KV use and prefix hit rate of ${engine.name} in percent`}
          series=${[{ name: "kv_share", colour: "accent", scale: 100, text: "KV used" }, { name: "prefix_hit_rate", colour: "cancelled", scale: 100, text: "prefix hits" }]} />`}
    </div>`}
    <${SharedPrefixes} of=${engine.shared_prefixes ?? []} readOnce=${engine.read_once_per_step} />
  </article>`;
}

const Figure = ({ name, of, children }) =>
  html`<div><dt>${name}</dt><dd>${children}${of && html`<small>${of}</small>`}</dd></div>`;

function KvCache({ engine }) {
  const { kv_used: used, kv_cached: cached, kv_total: total, kv_unit: unit } = engine;
  if (!total) return null;
  const text = `${count(used)} of ${count(total)} ${unit} of KV in use${cached ? `, ${count(cached)} more cached` : ""}`;
  return html`<div class="kv">
    <div class="meter" role="img" aria-label=${text}>
      <span style=${{ width: `${(used / total) * 100}%` }}></span>
      ${cached > 0 && html`<span class="is-cached" style=${{ width: `${(Math.min(cached, total - used) / total) * 100}%` }}></span>`}
    </div>
    <p class="muted">${text}</p>
  </div>`;
}

function SharedPrefixes({ of, readOnce }) {
  if (!of.length) return null;
  const shown = [...of].sort((a, b) => b.tokens * b.calls - a.tokens * a.calls).slice(0, MAX_PREFIXES);
  const most = shown[0].tokens * shown[0].calls;
  return html`<section class="prefixes">
    <h3>Shared prefixes${readOnce > 0 && html`, which save reading <b>${compact(Math.round(readOnce))} tokens</b> a step`}</h3>
    <ul>${shown.map(({ tokens, calls }, index) => html`<li key=${index}>
      <span class="bar" style=${{ width: `${(tokens * calls * 100) / most}%` }}></span>
      <span>${count(tokens)} tokens × ${count(calls)} calls</span>
    </li>`)}</ul>
  </section>`;
}

/** Needs the admin key, and asks for it. */
function Drain({ engine }) {
  const error = useSignal("");
  const isBusy = useSignal(false);
  if (engine.state !== "serving" && engine.state !== "draining") return null;
  const action = engine.state === "draining" ? "undrain" : "drain";
  const act = async () => {
    isBusy.value = true;
    error.value = "";
    try {
      const name = encodeURIComponent(engine.name);
      await request(`/admin/v1/engines/${name}/${action}`, { method: "POST", kind: "admin" });
    } catch (failure) {
      error.value = failure.message;
    }
    isBusy.value = false;
  };
  const isOff = gateway.value?.needs_admin_key_for_actions ?? true;
  const words = { drain: "Finish what runs, take nothing new", undrain: "Take work again" };
  const title = isOff ? "The gateway has no admin key (server.admin_key), so this is off" : words[action];
  return html`<span class="drain">
    <button type="button" onClick=${act} disabled=${isBusy.value || isOff} title=${title}>${action === "drain" ? "Drain" : "Undrain"}<span class="unseen"> ${engine.name}</span></button>
    ${error.value && html`<span class="failure" role="alert">${error.value}</span>`}
  </span>`;
}
