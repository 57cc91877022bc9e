// AI SDK: the provider for compatible servers, which is chat completions.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, tool } from "ai";
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

const provider = createOpenAICompatible({
  name: "gateway",
  baseURL: BASE_URL,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const model = provider(MODEL);
let text = "";
if (!ONLY_STRUCTURED) {
  const inputSchema = z.object({ city: z.string() });
  const tools = { get_weather: tool({ inputSchema, execute: getWeather }) };
  const options = { model, prompt: QUESTION, tools, stopWhen: stepCountIs(4) };
  text = (await generateText(options)).text;
}
const output = Output.object({ schema: Weather });
const form = await generateText({ model, prompt: QUESTION, output });
report("@ai-sdk/openai-compatible", text, form.output);
