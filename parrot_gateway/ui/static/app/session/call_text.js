/** Kept text of a call: its prompt, answer and variables, collapsed. */

import { html, useEffect, useSignal } from "../../vendor/preact.js";
import { requestJson } from "../data/api.js";
import { count, plural } from "../format.js";
import { CopyBlock } from "../parts/copy.js";

/**
 * The text of a call, fetched again once it has ended; null before there is any.
 *
 * Kept content is read a moment after the end, so it is requested once more then.
 */
export function useCallText(graph, node) {
  const text = useSignal(null);
  const isOver = node.finished_s !== null;
  useEffect(() => {
    if (node.kind === "transform") return undefined;
    const abort = new AbortController();
    const session = graph.isInferred ? "" : `?session=${encodeURIComponent(graph.session.id)}`;
    const path = `/ui/api/calls/${encodeURIComponent(node.id)}/text${session}`;
    let timer = 0;
    const ask = (triesLeft) =>
      requestJson(path, { signal: abort.signal })
        .then((found) => {
          text.value = found;
          const wasJustEnded = graph.now - node.finished_s < JUST_ENDED_S;
          if (isOver && !found.source && wasJustEnded && triesLeft > 0) {
            timer = setTimeout(ask, RETRY_MS, triesLeft - 1);
          }
        })
        .catch((error) => {
          if (!abort.signal.aborted) text.value = { why: error.message };
        });
    ask(TRIES);
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [node.id, isOver]);
  return text.value;
}

const [TRIES, RETRY_MS, JUST_ENDED_S] = [2, 500, 5];

export function CallText({ text }) {
  if (!text) return null;
  const { system_instructions: system = [], input_messages: input = [] } = text;
  const { output_messages: output = [], variables = [] } = text;
  const prompt = system.length ? [{ role: "instructions", parts: system }, ...input] : input;
  return html`<section class="call-text">
    <h3>Text</h3>
    ${prompt.length > 0 && html`<${Messages} title="Prompt" messages=${prompt} />`}
    ${output.length > 0 && html`<${Messages} title="Answer" messages=${output} />`}
    ${text.cut_characters > 0 && html`<p class="muted">${count(text.cut_characters)} characters are cut (telemetry.max_content_characters).</p>`}
    ${text.source && !output.length && html`<p class="muted">There was no answer in text.</p>`}
    ${variables.map((each) => html`<${VariableText} key=${each.id} variable=${each} />`)}
    ${text.why && html`<p class="muted">${text.why}</p>`}
    ${text.source === "response" && html`<p class="muted">Of the response that is stored for its client.</p>`}
  </section>`;
}

/** Whole messages with their roles, and a button to copy them all. */
function Messages({ title, messages }) {
  const shown = messages.map((message) => ({ role: message.role, text: message.parts.map(partText).join("\n") }));
  const length = shown.reduce((sum, { text }) => sum + text.length, 0);
  const noun = title === "Prompt" ? "message" : "candidate";
  const counted = shown.length > 1 ? `${plural(shown.length, noun)}, ` : "";
  const whole =
    shown.length > 1 ? shown.map(({ role, text }) => `${role}:\n${text}`).join("\n\n") : shown[0].text;
  return html`<${Folded} title=${title} size=${`${counted}${plural(length, "character")}`} text=${whole} />`;
}

export function VariableText({ variable }) {
  const { direction, name, value, characters, why, state } = variable;
  const title = direction ? `${direction === "reads" ? "Reads" : "Writes"} ${name}` : "Value";
  if (value == null || (value === "" && state !== "ready")) {
    return html`<p class="muted">${why ?? `${title}: there is no value (${state}).`}</p>`;
  }
  return html`<${Folded} title=${title} size=${plural(characters, "character")} text=${value} />`;
}

const Folded = ({ title, size, text }) => html`<details class="folded">
  <summary><b>${title}</b> <span class="muted">${size}</span></summary>
  <${CopyBlock} text=${text} label=${title.toLowerCase()} />
</details>`;

/** A message part in plain text. */
function partText(part) {
  switch (part.type) {
    case "text":
      return part.content;
    case "reasoning":
      return `[reasoning] ${part.content}`;
    case "tool_call":
      return `[calls ${part.name}] ${plain(part.arguments)}`;
    case "tool_call_response":
      return `[result] ${plain(part.response)}`;
    case "token_ids":
      return `[${plural(part.count, "token id")}]`;
    default:
      return `[${[part.modality ?? part.type, part.mime_type, part.uri ?? part.file_id].filter(Boolean).join(" ")}]`;
  }
}

const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));
