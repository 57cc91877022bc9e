// Semantic variables from TypeScript: two deferred calls feed a third (`openai` for Node).
//
//     cd examples/typescript && npm install && npm start
//
// OPENAI_BASE_URL and MODEL for another gateway or model.

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8000/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "none",
});
const session = `tale-${crypto.randomUUID()}`;

/** What a call tells the gateway besides what OpenAI's own do; docs/semantic-variables.md has all of it. */
type Parrot = { session: string; defer?: boolean; output?: string; inputs?: Record<string, string> };

/** How a text goes on; of a deferred call, a reference to that. */
async function write(prompt: string, parrot: Parrot): Promise<string> {
  const body = { model: process.env.MODEL ?? "parrot-demo", prompt, max_tokens: 24, seed: 7, parrot };
  // A field that the client does not know goes along untouched.
  const answer = await client.completions.create(body);
  return answer.choices[0]?.text ?? "";
}

// By references: the first two answer at once, with what stands for their texts.
const hero = await write("Once upon a time there was a little", { session, defer: true });
const place = await write("They lived in a big", { session, defer: true });
console.log(await write(`A little ${hero}. They lived in a big ${place}. One day`, { session }));

// By names: nothing has to come back, so that all three go out together.
const [, , tale] = await Promise.all([
  write("At midnight there came a", { session, defer: true, output: "guest" }),
  write("He carried in his hand a", { session, defer: true, output: "thing" }),
  write("At midnight there came a {{guest}}. He had a {{thing}}. And then", {
    session,
    inputs: { guest: "guest", thing: "thing" },
  }),
]);
console.log(tale);
