/** Runs a draft: with its graph declared to the gateway, or call by call like a plain client. */

import { signal } from "../../vendor/preact.js";
import { request, requestJson } from "../data/api.js";
import { EventParser } from "../data/event_stream.js";
import { inOrder, readsOf } from "./draft.js";
import { parrotFields, plainRequest } from "./requests.js";

/**
 * @typedef {object} Run
 * @property {"graph" | "calls"} kind
 * @property {string} name its session's name
 * @property {import("../../vendor/preact.js").Signal<string | null>} session its session's id, once known
 * @property {Map<string, Signal<string>>} texts of calls as they grow
 * @property {Signal<string>} error
 * @property {Signal<boolean>} isOver
 */

/** The last run of each kind. */
export const runs = signal({});

const WAYS = { graph: "graph", calls: "no graph" };

/**
 * @returns {string} such as "no graph, playground 5cc7"; plain letters, because it may be a header
 */
function nameOf(kind) {
  const digits = [...crypto.getRandomValues(new Uint8Array(2))].map((byte) => byte.toString(16).padStart(2, "0"));
  return `${WAYS[kind]}, playground ${digits.join("")}`;
}

/** @returns {Run} returned at once; it continues in the background */
export function start(kind, draft) {
  const calls = inOrder(draft.steps);
  const run = {
    kind,
    name: nameOf(kind),
    session: signal(null),
    texts: new Map(calls.map((step) => [step.name, signal("")])),
    error: signal(""),
    isOver: signal(false),
  };
  runs.value = { ...runs.value, [kind]: run };
  const work = kind === "graph" ? withGraph : callByCall;
  work(run, draft, calls)
    .catch((error) => (run.error.value = error.message))
    .finally(() => (run.isOver.value = true));
  return run;
}

/** Submit all calls together, and read their texts as they grow. */
async function withGraph(run, draft, calls) {
  const readers = [];
  for (const step of calls) {
    const { path, body } = plainRequest(step, draft);
    const parrot = { session: run.name, defer: true, ...parrotFields(step, draft.steps) };
    const answer = await post(path, { ...body, parrot });
    run.session.value ??= answer.headers.get("x-parrot-session");
    readers.push(follow(answer.headers.get("x-parrot-variable"), run.texts.get(step.name)));
  }
  await Promise.all(readers);
}

/** Send each call with the earlier texts in its prompt; only the session's name is declared. */
async function callByCall(run, draft, calls) {
  const texts = new Map(draft.steps.filter((each) => each.kind === "text").map((each) => [each.name, each.text]));
  const pending = new Map();
  for (const step of calls) {
    pending.set(
      step.name,
      Promise.all(readsOf(step).map((name) => pending.get(name))).then(async () => {
        const prompt = step.text.replace(/\{\{\s*([A-Za-z_]\w*)\s*\}\}/g, (_, name) => texts.get(name));
        const { path, body } = plainRequest(step, draft, prompt);
        const answer = await post(path, body, { "x-session-id": run.name });
        run.session.value ??= answer.headers.get("x-parrot-session");
        const [choice] = (await answer.json()).choices;
        const text = choice.text ?? choice.message?.content ?? "";
        texts.set(step.name, text);
        run.texts.get(step.name).value = text;
      }),
    );
  }
  const results = await Promise.allSettled(pending.values());
  const failed = results.find((each) => each.status === "rejected");
  if (failed) throw failed.reason;
}

const post = (path, body, headers = {}) =>
  request(path, {
    kind: "calls",
    method: "POST",
    headers: { "content-type": "application/json", ...headers },
    body: JSON.stringify(body),
  });

/** Read a variable's text piece by piece. */
async function follow(variable, text) {
  const headers = { accept: "text/event-stream" };
  const { body } = await request(`/v1/variables/${encodeURIComponent(variable)}`, { kind: "calls", headers });
  const parser = new EventParser();
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    for (const { data } of parser.push(value)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      if (typeof event.text === "string") text.value += event.text;
    }
  }
}

/** List the models that the user can choose. */
export async function listModels() {
  const { data } = await requestJson("/v1/models", { kind: "calls" });
  return data.map((model) => model.id);
}
