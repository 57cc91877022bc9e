// openai for Node: runTools on chat completions, Responses with `parse`.
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { MODEL, ONLY_STRUCTURED, QUESTION, Weather, getWeather, report } from "./common.mjs";

const client = new OpenAI();
let text = "";
if (!ONLY_STRUCTURED) {
  const runner = client.chat.completions.runTools({
    model: MODEL,
    stream: true,
    messages: [{ role: "user", content: QUESTION }],
    tools: [
      {
        type: "function",
        function: {
          name: "get_weather",
          function: getWeather,
          parse: JSON.parse,
          parameters: { type: "object", properties: { city: { type: "string" } } },
        },
      },
    ],
  });
  text = await runner.finalContent();
}
const form = await client.responses.parse({
  model: MODEL,
  input: QUESTION,
  text: { format: zodTextFormat(Weather, "weather") },
});
report("openai", text, form.output_parsed);
