/** The gateway's current state: sessions, engines, scheduler and tenants, updated by events. */

import { batch, signal } from "../../vendor/preact.js";
import { followStream } from "./event_stream.js";
import { onNextFrame } from "./frame.js";

/** Maximum sessions kept; the gateway reports the newest ones. */
const MAX_SESSIONS = 2_000;
/** Points of an engine's charts: four minutes at one per second. */
const MAX_POINTS = 240;

/** "connecting", "live", "lost" or "refused". */
export const connection = signal("connecting");
export const refusal = signal(null);
export const engines = signal([]);
export const scheduler = signal(null);
export const tenants = signal([]);
export const models = signal([]);
/** `{version, uptime_s, calls, needs_admin_key_for_actions}`. */
export const gateway = signal(null);

/** Sessions by key; read this where `sessionsChanged` is read. */
export const sessions = new Map();
export const sessionsChanged = signal(0);

/** By engine id: `{at: [], running: [], …}`, all of equal length. */
export const histories = new Map();
export const historyChanged = signal(0);
const SERIES = ["running", "waiting", "kv_share", "prefix_hit_rate", "step_ms", "tokens_per_s"];

/** The address of a session: its id, unless the gateway gives another key. */
export const keyOf = (session) => session.key ?? session.id;

const bumpSessions = () => (sessionsChanged.value += 1);
const bumpHistory = () => (historyChanged.value += 1);

function keepSession(session) {
  sessions.set(keyOf(session), session);
  if (sessions.size > MAX_SESSIONS) sessions.delete(sessions.keys().next().value);
}

function keepHistory(at, views) {
  const known = new Set(views.map((engine) => engine.id));
  for (const id of histories.keys()) if (!known.has(id)) histories.delete(id);
  for (const engine of views) {
    let history = histories.get(engine.id);
    if (!history) {
      history = { at: [], ...Object.fromEntries(SERIES.map((name) => [name, []])) };
      histories.set(engine.id, history);
    }
    const share = engine.kv_total ? engine.kv_used / engine.kv_total : null;
    history.at.push(at);
    for (const name of SERIES) {
      history[name].push(name === "kv_share" ? share : (engine[name] ?? null));
    }
    if (history.at.length > MAX_POINTS) for (const points of Object.values(history)) points.shift();
  }
  onNextFrame(bumpHistory);
}

const HANDLERS = {
  overview(data) {
    batch(() => {
      const { version, uptime_s, calls, needs_admin_key_for_actions, at } = data;
      gateway.value = { version, uptime_s, calls, needs_admin_key_for_actions, at };
      models.value = data.models ?? [];
      engines.value = data.engines ?? [];
      scheduler.value = data.scheduler ?? null;
      tenants.value = data.tenants ?? [];
      sessions.clear();
      for (const session of data.sessions ?? []) keepSession(session);
      bumpSessions();
    });
    keepHistory(data.at ?? Date.now() / 1000, engines.value);
  },
  sessions(data) {
    if (Array.isArray(data)) for (const session of data) keepSession(session);
    else for (const key of data.gone ?? []) sessions.delete(key);
    onNextFrame(bumpSessions);
  },
  engines(data) {
    engines.value = data;
    keepHistory(Date.now() / 1000, data);
  },
  scheduler(data) {
    scheduler.value = data;
  },
  tenants(data) {
    tenants.value = data;
  },
};

/** Follow the gateway until the page closes. */
export function followGateway() {
  return followStream("/ui/api/events", {
    onEvent: (name, data) => HANDLERS[name]?.(data),
    onState(state, error) {
      batch(() => {
        connection.value = state;
        refusal.value = error ?? null;
      });
    },
  });
}
