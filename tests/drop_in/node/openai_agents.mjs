// OpenAI Agents SDK for JavaScript, on Responses as by default.
import { Agent, run, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";
import { MODEL, ONLY_STRUCTURED, QUESTION, Weather, getWeather, report } from "./common.mjs";

setTracingDisabled(true);
let text = "";
if (!ONLY_STRUCTURED) {
  const lookUp = tool({
    name: "get_weather",
    description: "Get the weather of a city.",
    parameters: z.object({ city: z.string() }),
    execute: getWeather,
  });
  const agent = new Agent({ name: "a", model: MODEL, tools: [lookUp] });
  text = (await run(agent, QUESTION)).finalOutput;
}
const form = new Agent({ name: "b", model: MODEL, outputType: Weather });
report("@openai/agents", text, (await run(form, QUESTION)).finalOutput);
