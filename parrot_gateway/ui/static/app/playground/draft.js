/** A small graph of calls while the user writes it. */

import { signal } from "../../vendor/preact.js";

/**
 * @typedef {object} Step
 * @property {number} id
 * @property {"call" | "text"} kind a text is given; the model writes a call's text
 * @property {string} name of the variable
 * @property {string} text the prompt, with `{{name}}` of other variables; or the text itself
 * @property {number} maxTokens
 */

const PLACEHOLDER = /\{\{\s*([A-Za-z_]\w*)\s*\}\}/g;
const NAME = /^[A-Za-z_]\w*$/;
/** As many calls as fit on a readable page. */
export const MAX_STEPS = 40;

let lastId = 0;
const step = (kind, name, text, maxTokens = 40) => ({ id: ++lastId, kind, name, text, maxTokens });

export const SAMPLES = {
  "A tale of two parts": () => [
    step("call", "hero", "Once upon a time there was a little"),
    step("call", "place", "They lived in a big"),
    step("call", "tale", "A little {{hero}}. They lived in a big {{place}}. One day", 60),
  ],
  "A chain": () => [
    step("text", "topic", "a ship in a storm"),
    step("call", "outline", "An outline of a story about {{topic}}:"),
    step("call", "draft", "The story of {{topic}}, by this outline: {{outline}}\n\nIt begins:", 80),
    step("call", "title", "{{draft}}\n\nA title for this story:", 12),
  ],
  "Map and reduce": () => [
    ...[1, 2, 3, 4].map((n) => step("call", `part_${n}`, `Chapter ${n} of the old book tells of`)),
    step("call", "summary", `All chapters: ${[1, 2, 3, 4].map((n) => `{{part_${n}}}`).join(" ")}\n\nIn short:`, 60),
  ],
};

/** The current draft; it survives changes of view, but not of the page. */
export const draft = signal({ steps: SAMPLES["A tale of two parts"](), model: "", isChat: false });

export const update = (change) => (draft.value = { ...draft.value, ...change });

export const updateStep = (id, change) =>
  update({ steps: draft.value.steps.map((each) => (each.id === id ? { ...each, ...change } : each)) });

export function addStep(kind) {
  const { steps } = draft.value;
  const taken = new Set(steps.map((each) => each.name));
  let number = steps.length + 1;
  while (taken.has(`${kind}_${number}`)) number += 1;
  update({ steps: [...steps, step(kind, `${kind}_${number}`, "")] });
}

export const removeStep = (id) =>
  update({ steps: draft.value.steps.filter((each) => each.id !== id) });

/** Distinct names of the variables that a step reads. */
export const readsOf = (each) =>
  each.kind === "text" ? [] : [...new Set([...each.text.matchAll(PLACEHOLDER)].map((m) => m[1]))];

export const callsOf = (steps) => steps.filter((each) => each.kind === "call");

/** Calls that no other call reads: the application's results. */
export function resultsOf(steps) {
  const read = new Set(steps.flatMap(readsOf));
  return callsOf(steps).filter((each) => !read.has(each.name));
}

/** Faults by step id; empty if the draft can run. */
export function faultsOf(steps) {
  const faults = new Map();
  const names = new Map();
  for (const each of steps) {
    if (!NAME.test(each.name)) faults.set(each.id, "A name has letters, digits and _, no digit first.");
    else if (names.has(each.name)) faults.set(each.id, `There is another ${each.name}.`);
    else if (!each.text.trim()) faults.set(each.id, each.kind === "text" ? "No text yet." : "No prompt yet.");
    names.set(each.name, each);
  }
  for (const each of steps) {
    const unknown = readsOf(each).find((name) => !names.has(name));
    if (unknown) faults.set(each.id, `Nothing here is called ${unknown}.`);
    else if (waitsForItself(each, names)) faults.set(each.id, "It would wait for its own text.");
  }
  return faults;
}

function waitsForItself(first, names) {
  const seen = new Set();
  const waiting = readsOf(first);
  while (waiting.length) {
    const name = waiting.pop();
    if (name === first.name) return true;
    if (seen.has(name) || !names.has(name)) continue;
    seen.add(name);
    waiting.push(...readsOf(names.get(name)));
  }
  return false;
}

/** Calls ordered so that each comes after its inputs. */
export function inOrder(steps) {
  const done = new Set(steps.filter((each) => each.kind === "text").map((each) => each.name));
  const left = callsOf(steps);
  const ordered = [];
  while (left.length) {
    const next = left.findIndex((each) => readsOf(each).every((name) => done.has(name)));
    if (next < 0) break;
    const [found] = left.splice(next, 1);
    done.add(found.name);
    ordered.push(found);
  }
  return ordered;
}

/** The draft as the data of an event `graph`; nothing is submitted. */
export function asGraph(steps) {
  const depth = new Map();
  for (const each of inOrder(steps)) {
    const below = readsOf(each).map((name) => depth.get(name) ?? -1);
    depth.set(each.name, Math.max(-1, ...below) + 1);
  }
  const calls = callsOf(steps).filter((each) => depth.has(each.name));
  return {
    session: { id: "", name: "" },
    calls: calls.map((each) => ({
      id: `call ${each.name}`, name: each.name, kind: "call", state: "waiting", stage: depth.get(each.name),
      inputs: readsOf(each), output: each.name, tools: [], engine: null, group: null, tokens: 0, failure: null,
      maxTokens: each.maxTokens, submitted_s: 0, started_s: null, first_token_s: null, finished_s: null,
    })),
    variables: steps.map((each) => ({
      id: each.name, name: each.name, session: null, size_bytes: 0,
      state: each.kind === "text" ? "ready" : "empty",
      producer: each.kind === "text" ? null : `call ${each.name}`,
      consumers: calls.filter((other) => readsOf(other).includes(each.name)).map((other) => `call ${other.name}`),
    })),
    links: [], inferred: false, duration_s: 0, now_s: 0,
  };
}
