// What all programs share: see programs/common.py.
import { readFileSync } from "node:fs";
import { z } from "zod";

export const MODEL = process.env.DROP_IN_MODEL;
export const ONLY_STRUCTURED = process.env.DROP_IN_ONLY_STRUCTURED === "1";
export const BASE_URL = process.env.OPENAI_BASE_URL;
export const QUESTION = "What is the weather in Paris? Look it up with get_weather.";
export const REPORT = "It is 21 degrees and sunny in Paris.";
export const Weather = z.object({ city: z.string(), temperature: z.number().int() });
export const called = [];

export function getWeather({ city }) {
  called.push(city);
  return REPORT;
}

export function report(name, text, structured, unable) {
  const path = new URL(`./node_modules/${name}/package.json`, import.meta.url);
  const { version } = JSON.parse(readFileSync(path, "utf-8"));
  console.log("DROP_IN " + JSON.stringify({ version, called, text, structured, unable }));
}
