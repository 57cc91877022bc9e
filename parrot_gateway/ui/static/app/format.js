/** Formats numbers, durations and moments for the whole page. */

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** Text for an unknown figure. */
export const UNKNOWN = "–";

export const count = (value) => (value == null ? UNKNOWN : whole.format(value));
/** 18.2K, for narrow columns. */
export const compact = (value) =>
  value == null ? UNKNOWN : value < 10_000 ? whole.format(value) : short.format(value);
export const percent = (share) => (share == null ? UNKNOWN : `${Math.round(share * 100)} %`);
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** 340 ms, 1.2 s, 2 min 05 s, 3 h 20 min, 4 d 2 h. */
export function duration(seconds) {
  if (seconds == null) return UNKNOWN;
  const s = Math.max(0, seconds);
  if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
  if (s < 59.95) return `${s.toFixed(s < 9.995 ? 2 : 1)} s`;
  const all = Math.round(s);
  if (all < 3600) return `${Math.floor(all / 60)} min ${String(all % 60).padStart(2, "0")} s`;
  if (all < 86_400) return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
  return `${Math.floor(all / 86_400)} d ${Math.floor((all % 86_400) / 3600)} h`;
}

/** now, 12 s ago, 5 min ago, 3 h ago. `at` is a Unix time. */
export function ago(at, now = Date.now() / 1000) {
  const s = Math.max(0, now - at);
  if (s < 2) return "now";
  if (s < 60) return `${Math.floor(s)} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86_400) return `${Math.floor(s / 3600)} h ago`;
  return `${Math.floor(s / 86_400)} d ago`;
}

/** The title of a session for people. */
export const titleOf = (session) => session.title || session.name || session.id;

/** 14:03:27, with the day if it is not today. `at` is a Unix time. */
export function clockTime(at) {
  const then = new Date(at * 1000);
  const isToday = then.toDateString() === new Date().toDateString();
  const time = then.toLocaleTimeString("en-GB");
  return isToday ? time : `${then.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}

const LONGEST_ENGINE = 11;

/** An engine's name without the random digits at its end, for narrow places. */
export const engineName = (name) => name.replace(/-[0-9a-f]{8}$/, "");

/** The end of an engine's name, which distinguishes similar ones. */
export function shortEngineName(name) {
  const full = engineName(name);
  if (full.length <= LONGEST_ENGINE) return full;
  const cut = full.slice(2 - LONGEST_ENGINE);
  return `…${cut.includes("-") ? cut.slice(cut.indexOf("-") + 1) : cut}`;
}

/** Share of cached tokens; null if there are no tokens. */
export const cachedShare = (of) =>
  of.prompt_tokens && of.cached_tokens != null ? of.cached_tokens / of.prompt_tokens : null;
