/**
 * Server-sent events over fetch, which unlike EventSource can send an Authorization header.
 *
 * Reconnects with back-off until it is closed.
 */

import { ApiError, request } from "./api.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;
/** An event larger than this is a fault, not data. */
const MAX_EVENT_CHARACTERS = 64 * 1024 * 1024;

/** Splits a stream of text into events; comments and ids are skipped. */
export class EventParser {
  #rest = "";

  /** @returns {{name: string, data: string}[]} the events that this piece completes */
  push(text) {
    this.#rest += text;
    const blocks = this.#rest.split(/\r?\n\r?\n/);
    this.#rest = blocks.pop();
    if (this.#rest.length > MAX_EVENT_CHARACTERS) throw new Error("An event without an end.");
    return blocks.map(parseBlock).filter((event) => event.data !== "");
  }
}

function parseBlock(block) {
  let name = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue;
    const value = line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    if (line.startsWith("event:")) name = value;
    if (line.startsWith("data:")) data.push(value);
  }
  return { name, data: data.join("\n") };
}

/**
 * Follow a stream until it is closed.
 *
 * @param {string} path
 * @param {object} handlers
 * @param {(name: string, data: any) => void} handlers.onEvent data is parsed JSON
 * @param {(state: "connecting" | "live" | "lost" | "refused", error?: Error) => void} handlers.onState
 *   `refused` ends it: the session is unknown, or no key was given
 * @param {boolean} [handlers.endsClosed] an event `closed` ends it; otherwise it reconnects
 * @returns {() => void} closes it
 */
export function followStream(path, { onEvent, onState, endsClosed = false }) {
  const abort = new AbortController();
  run(path, { onEvent, onState, endsClosed }, abort.signal);
  return () => abort.abort();
}

async function run(path, { onEvent, onState, endsClosed }, signal) {
  let wait = FIRST_WAIT_MS;
  onState("connecting");
  while (!signal.aborted) {
    try {
      const headers = { accept: "text/event-stream" };
      const response = await request(path, { signal, headers });
      onState("live");
      for await (const event of eventsOf(response.body)) {
        wait = FIRST_WAIT_MS;
        if (signal.aborted) return;
        onEvent(event.name, JSON.parse(event.data));
        if (event.name === "closed" && endsClosed) return;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status < 500 && error.status !== 429) {
        onState("refused", error);
        return;
      }
    }
    if (signal.aborted) return;
    onState("lost");
    await pause(wait * (0.75 + Math.random() / 2), signal);
    wait = Math.min(wait * 2, LONGEST_WAIT_MS);
  }
}

async function* eventsOf(body) {
  const parser = new EventParser();
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield* parser.push(value);
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
