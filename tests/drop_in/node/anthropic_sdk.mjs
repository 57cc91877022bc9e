// anthropic for Node: messages with a tool, streamed; a forced tool as structured output.
import Anthropic from "@anthropic-ai/sdk";
import { z } from "zod";
import {
  BASE_URL,
  MODEL,
  ONLY_STRUCTURED,
  QUESTION,
  Weather,
  getWeather,
  report,
} from "./common.mjs";

const client = new Anthropic({ baseURL: BASE_URL.replace(/\/v1$/, ""), apiKey: "none" });
const tools = [
  { name: "get_weather", input_schema: z.toJSONSchema(z.object({ city: z.string() })) },
];
const messages = [{ role: "user", content: QUESTION }];
let text = "";
while (!ONLY_STRUCTURED) {
  const stream = client.messages.stream({ model: MODEL, max_tokens: 500, messages, tools });
  const { content } = await stream.finalMessage();
  messages.push({ role: "assistant", content });
  const results = content
    .filter((block) => block.type === "tool_use")
    .map(({ id, input }) => ({ type: "tool_result", tool_use_id: id, content: getWeather(input) }));
  if (!results.length) {
    text = content.map((block) => block.text ?? "").join("");
    break;
  }
  messages.push({ role: "user", content: results });
}
const forced = await client.messages.create({
  model: MODEL,
  max_tokens: 500,
  messages: messages.slice(0, 1),
  tools: [{ name: "weather", input_schema: z.toJSONSchema(Weather) }],
  tool_choice: { type: "tool", name: "weather" },
});
const found = forced.content.find((block) => block.type === "tool_use").input;
report("@anthropic-ai/sdk", text, Weather.parse(found));
