"""An engine that plays the model of an agent: the gateway before it is whole, only tokens are made.

It reads the chat back out of the prompt, which its template writes as JSON, and answers as a
model would that does what it is asked:

- it calls each tool that is offered once, in their order, with arguments of the tool's schema;
  where the question names some, only those;
- asked for JSON of a schema, it writes such a document;
- asked for the forms of DSPy or of ReAct prompts, it fills them;
- else it repeats what the tool has said.

Values go by the names of fields (`FACTS`), else by their types.
"""

from __future__ import annotations

import json
import re
from typing import Any

from parrot_engine.protocol import Grammar, SamplingParams
from parrot_engine.text import TextAssets, Tokenizer

from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.schema_document import document_of

#: What there is to know.
FACTS: dict[str, Any] = {"city": "Paris", "temperature": 21}
REPORT = "It is 21 degrees and sunny in Paris."

#: Mentions <tool_call>: calls are written as Hermes' models write them.
TEMPLATE = (
    "{# <tool_call> #}{{ {'messages': messages, 'tools': tools | default(none)} | tojson }}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
#: Longest prompts are those of frameworks with instructions of their own; a byte is a token.
MAX_CONTEXT_TOKENS = 262_144

_DSPY_FIELD = re.compile(r"\[\[ ## (\w+) ## \]\]")


class CleverEngine(ScriptedRemoteEngine):
    """See above."""

    def __init__(self) -> None:
        super().__init__(
            self._script,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            tokens_per_step=16,
            supports_grammars=True,
        )
        assets = self.tokenizer.assets
        self.tokenizer = Tokenizer(
            TextAssets(
                tokenizer_json=assets.tokenizer_json,
                chat_template=TEMPLATE,
                special_tokens=assets.special_tokens,
            )
        )

    def _script(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        text = self.tokenizer.decode(prompt, skip_special_tokens=True)
        try:
            chat = json.loads(text)
        except ValueError:
            return self.text(REPORT)
        return self.text(answer(chat["messages"], chat["tools"] or [], sampling.grammar))


def answer(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], grammar: Grammar | None
) -> str:
    """Return what the model says next."""
    content = _content_schema(grammar)
    functions = [tool["function"] for tool in tools]
    left = [each for each in functions if each["name"] not in _called(messages)]
    question = next((each["content"] for each in messages[::-1] if each["role"] == "user"), "")
    named = [each for each in functions if each["name"].rpartition("__")[2] in str(question)]
    if grammar is not None and content is None and "start: calls" in grammar.text:
        # It has to call one of those that the grammar names.
        allowed = [each for each in functions if json.dumps(each["name"])[1:-1] in grammar.text]
        left = [each for each in left if each in allowed] or allowed[-1:]
    elif named:
        left = [each for each in left if each in named]
    if left:
        return _call(left[0])
    if content is not None:
        return json.dumps(document_of(content, _value))
    return _in_a_form(messages)


def _value(kind: str, name: str) -> Any:
    """Make a value for a field of that type and name."""
    usual: dict[str, Any] = {"integer": 1, "number": 1, "boolean": True, "null": None}
    if kind in ("boolean", "null"):
        return usual[kind]
    known = FACTS.get(name, usual.get(kind, REPORT))
    return str(known) if kind == "string" else known


def _call(function: dict[str, Any]) -> str:
    arguments = document_of(function.get("parameters") or {"type": "object"}, _value)
    call = json.dumps({"name": function["name"], "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def _called(messages: list[dict[str, Any]]) -> set[str]:
    """Tools called since a person spoke last."""
    names: set[str] = set()
    for message in reversed(messages):
        if message["role"] == "user":
            break
        names |= {call["function"]["name"] for call in message.get("tool_calls") or ()}
    return names


def _content_schema(grammar: Grammar | None) -> dict[str, Any] | None:
    """The schema that an answer without calls has to follow."""
    if grammar is None:
        return None
    if grammar.kind == "json_object":
        return {"properties": {name: {} for name in FACTS}}
    if grammar.kind == "json_schema":
        schema: dict[str, Any] = json.loads(grammar.text)
        return schema
    found = re.search(r"^content: %json (.+)$", grammar.text, re.MULTILINE)
    return None if found is None else json.loads(found[1])


def _in_a_form(messages: list[dict[str, Any]]) -> str:
    """A text, in the form that the prompt describes."""
    said = [str(message.get("content") or "") for message in messages]
    everything, last = "\n".join(said), said[-1]
    is_known = REPORT in everything
    if "[[ ## " in last:
        asked = _DSPY_FIELD.findall(last.rpartition("Respond with")[2])
        values = {
            **FACTS,
            "next_thought": "I look it up.",
            "next_tool_name": "finish" if REPORT in last else "get_weather",
            "next_tool_args": json.dumps({} if REPORT in last else {"city": FACTS["city"]}),
        }
        return "\n\n".join(f"[[ ## {name} ## ]]\n{values.get(name, REPORT)}" for name in asked)
    if "Action Input:" in everything and not is_known:
        arguments = json.dumps({"city": FACTS["city"]})
        return f"Thought: I look it up.\nAction: get_weather\nAction Input: {arguments}"
    if "Final Answer:" in everything:
        return f"Thought: I now know the final answer.\nFinal Answer: {REPORT}"
    return REPORT
