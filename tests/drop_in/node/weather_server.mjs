// An MCP server with the tool of common.mjs; appends the cities it is asked for to a file.
import { appendFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { REPORT } from "./common.mjs";

const tool = {
  name: "get_weather",
  description: "Get the weather of a city.",
  inputSchema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const answers = {
  initialize: ({ protocolVersion }) => ({
    protocolVersion,
    capabilities: { tools: {} },
    serverInfo: { name: "weather", version: "1" },
  }),
  "tools/list": () => ({ tools: [tool] }),
  "tools/call": ({ arguments: { city } }) => {
    appendFileSync(process.argv[2], `${city}\n`);
    return { content: [{ type: "text", text: REPORT }] };
  },
};
for await (const line of createInterface({ input: process.stdin })) {
  const { id, method, params } = JSON.parse(line);
  if (id === undefined) continue;
  const answer = answers[method];
  const said = answer
    ? { result: answer(params ?? {}) }
    : { error: { code: -32601, message: "Method not found" } };
  console.log(JSON.stringify({ jsonrpc: "2.0", id, ...said }));
}
