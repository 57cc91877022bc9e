// AI SDK: openai(), which is Responses, in a streamed tool loop; an object as output.
import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { MODEL, ONLY_STRUCTURED, QUESTION, Weather, getWeather, report } from "./common.mjs";

const openai = createOpenAI();
let text = "";
if (!ONLY_STRUCTURED) {
  const inputSchema = z.object({ city: z.string() });
  const tools = { get_weather: tool({ inputSchema, execute: getWeather }) };
  text = await streamText({
    model: openai(MODEL),
    prompt: QUESTION,
    tools,
    stopWhen: stepCountIs(4),
  }).text;
}
const form = await generateText({
  model: openai(MODEL),
  prompt: QUESTION,
  output: Output.object({ schema: Weather }),
});
report("ai", text, form.output);
