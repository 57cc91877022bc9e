/** The requests of a draft, as sent and as programs. */

import { GATEWAY } from "../data/api.js";
import { callsOf, inOrder, readsOf, resultsOf } from "./draft.js";

/** `/v1/completions` or `/v1/chat/completions`, and the body without Parrot's fields. */
export function plainRequest(step, { model, isChat }, prompt = step.text) {
  const max = { model, max_tokens: step.maxTokens };
  return isChat
    ? { path: "/v1/chat/completions", body: { ...max, messages: [{ role: "user", content: prompt }] } }
    : { path: "/v1/completions", body: { ...max, prompt } };
}

/** The fields that declare the graph to the gateway. */
export function parrotFields(step, steps) {
  const given = new Map(steps.filter((each) => each.kind === "text").map((each) => [each.name, each.text]));
  const reads = readsOf(step);
  const fields = { output: step.name };
  if (reads.length) {
    fields.inputs = Object.fromEntries(
      reads.map((name) => [name, given.has(name) ? { value: given.get(name) } : name]),
    );
  }
  return fields;
}

const BASE = `${GATEWAY}/v1`;

/** JSON's strings, numbers, lists and objects are valid Python too. */
const python = (value) => JSON.stringify(value, null, 1).replace(/\n\s*/g, " ").replace(/([{[]) | ([}\]])/g, "$1$2");

const keywords = (fields) =>
  Object.entries(fields).map(([name, value]) => `, ${name}=${value === true ? "True" : python(value)}`).join("");

export function asPython({ steps, model, isChat }) {
  const results = resultsOf(steps);
  const prompt = isChat ? 'messages=[{"role": "user", "content": prompt}]' : "prompt=prompt";
  const route = isChat ? "client.chat.completions" : "client.completions";
  const text = isChat ? "message.content" : "text";
  const lines = inOrder(steps).map((step) => {
    const call = `write(${python(step.text)}, ${step.maxTokens}${keywords(parrotFields(step, steps))})`;
    return results.includes(step) ? `${step.name} = ${call}` : call;
  });
  return `import secrets

from openai import OpenAI

session = f"playground-{secrets.token_hex(4)}"
client = OpenAI(base_url=${python(BASE)}, api_key="none")


def write(prompt, max_tokens, **parrot):
    """Answered at once with a reference; the gateway runs the call when its inputs are there."""
    answer = ${route}.create(
        model=${python(model)}, ${prompt}, max_tokens=max_tokens,
        extra_body={"parrot": {"session": session, "defer": True, **parrot}},
    )
    return answer.choices[0].${text}


def read(reference):
    return client.get(f"/variables/{reference.strip('[]')}", cast_to=object)["value"]


${lines.join("\n")}
${results.map((step) => `print(read(${step.name}))`).join("\n")}
`;
}

export function asLangChain({ steps, model, isChat }) {
  const [name, text] = isChat ? ["ChatParrot", "answer.content"] : ["ParrotLLM", "answer"];
  const lines = callsOf(steps).map(
    (step) => `    ${step.name}=call(${python(step.text)}, max_tokens=${step.maxTokens}${keywords(parrotFields(step, steps))}),`,
  );
  return `import secrets

from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_parrot import ${name}

session = f"playground-{secrets.token_hex(4)}"
llm = ${name}(model=${python(model)}, base_url=${python(BASE)})


def call(prompt, **parrot):
    return RunnableLambda(lambda _: prompt) | llm.bind(session=session, **parrot)


# All go out together; each waits in the gateway for what it reads.
graph = RunnableParallel(
${lines.join("\n")}
)
for name, answer in graph.invoke(None).items():
    print(f"{name}: {${text}}")
`;
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function asCurl(draft) {
  const results = resultsOf(draft.steps);
  const commands = inOrder(draft.steps).map((step) => {
    const { path, body } = plainRequest(step, draft);
    const parrot = parrotFields(step, draft.steps);
    if (!results.includes(step)) parrot.defer = true;
    return `curl -s ${GATEWAY}${path} -H "Authorization: Bearer $OPENAI_API_KEY" -H "X-Parrot-Session: $session" -H 'Content-Type: application/json' \\\n  -d ${quoted(JSON.stringify({ ...body, parrot }))}`;
  });
  return `session=playground-$$-$(date +%s)\n${commands.join("\n")}\n`;
}
