/** Requests as commands. They never contain a key; they read it from the environment. */

import { GATEWAY } from "../data/api.js";

const quoted = (text) => `'${String(text).replaceAll("'", `'\\''`)}'`;
const AUTHORIZATION = '-H "Authorization: Bearer $OPENAI_API_KEY"';

/** A command that looks up the gateway's facts about a call. */
export const curlToLookUp = (node) =>
  `curl ${GATEWAY}/v1/calls/${encodeURIComponent(node.id)} \\\n  ${AUTHORIZATION}`;

/** A request as sent, with the values of its variables. */
export function curlOfRequest({ path, request }, graph) {
  const headers = ["Content-Type: application/json"];
  if (!graph.isInferred) headers.push(`X-Parrot-Session: ${graph.session.name || graph.session.id}`);
  return curl(path, headers, request);
}

/**
 * A request of the same shape: route, model, session and variables. The prompt is not kept, so the
 * names of its inputs replace it.
 */
export function curlOfCall(node, graph, record) {
  const path = record?.path?.startsWith("/v1/") ? record.path : "/v1/chat/completions";
  const variableName = (id) => graph.variables.get(id)?.name ?? id;
  const inputs = node.inputs.map(variableName);
  const headers = ["Content-Type: application/json"];
  if (!graph.isInferred) headers.push(`X-Parrot-Session: ${graph.session.name || graph.session.id}`);
  const isDeclared = inputs.length > 0 || node.output;
  if (isDeclared) headers.push(`X-Parrot-Name: ${node.name}`);
  if (inputs.length) headers.push(`X-Parrot-Input: ${inputs.map((name) => `${name}=${name}`).join(", ")}`);
  if (node.output) headers.push(`X-Parrot-Output: ${variableName(node.output)}`);
  if (node.group) headers.push(`X-Parrot-Group: ${node.group}`);
  const prompt = ["…", ...inputs.map((name) => `{{${name}}}`)].join(" ");
  const body = { model: node.model ?? record?.model, ...promptOf(path, prompt) };
  return curl(path, headers, JSON.stringify(body));
}

const curl = (path, headers, body) =>
  [
    `curl ${GATEWAY}${path}`,
    AUTHORIZATION,
    ...headers.map((header) => `-H ${quoted(header)}`),
    `-d ${quoted(body)}`,
  ].join(" \\\n  ");

function promptOf(path, prompt) {
  if (path === "/v1/completions") return { prompt };
  if (path === "/v1/responses") return { input: prompt };
  const messages = [{ role: "user", content: prompt }];
  return path === "/v1/messages" ? { max_tokens: 1024, messages } : { messages };
}
