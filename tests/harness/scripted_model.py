"""A model of a few rules behind OpenAI's routes: it plays dialogues sensibly and always the same.

- Tools are offered, may be called, and the last message is a person's: it calls the one that
  `tool_choice` names, else the one that the question names, else the first, with arguments read
  from the question.
- `response_format` wants a schema: it writes a document of that schema; any JSON: an object of the
  keys that the question has in quotes.
- Else it says what it was asked. `/v1/completions` goes on with the prompt's last word.

Tokens are words. It counts all but the last one of a prompt as cached, and one as thought about;
a model whose name has `thinking` in it says what it thinks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from harness.schema_document import document_of
from harness.scripted_upstream import Answer, Received, ScriptedUpstream, document, event_stream

MODEL = "scripted"
OTHER_MODEL = "scripted-two"
THINKING_MODEL = "scripted-thinking"

Body = dict[str, Any]


# -- what it answers --------------------------------------------------------------------------


def text_of(message: Body) -> str:
    """The text of a message, parts joined."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", f"<{part['type']}>") for part in content)


def values_of(question: str) -> Callable[[str, str], Any]:
    """Values for documents: the numbers and quoted words of the question."""
    numbers = iter([*re.findall(r"-?\d+", question), *("7",) * 100])
    words = iter([*re.findall(r"['\"](.+?)['\"]", question), *[question.strip(" .?")] * 100])
    makers: dict[str, Callable[[], Any]] = {
        "integer": lambda: int(next(numbers)),
        "number": lambda: float(next(numbers)),
        "string": lambda: next(words),
        "boolean": lambda: True,
        "null": lambda: None,
        "any": dict,
    }
    return lambda kind, name: makers[kind]()


def message_for(body: Body) -> Body:
    """The assistant's message that answers a chat body."""
    last = body["messages"][-1]
    question = text_of(last)
    said: Body = {"role": "assistant", "content": None, "refusal": None}
    if "thinking" in body["model"]:
        said["reasoning_content"] = "Let me see."
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    choice = body.get("tool_choice") or "auto"
    if tools and choice != "none" and last["role"] == "user":
        named = choice["function"]["name"] if isinstance(choice, dict) else None
        asked = next((name for name in tools if re.search(rf"\b{name}\b", question)), None)
        tool = tools[named or asked or next(iter(tools))]
        arguments = document_of(tool.get("parameters") or {"type": "object"}, values_of(question))
        function = {"name": tool["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        said["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        return said
    wanted = body.get("response_format") or {"type": "text"}
    if wanted["type"] == "json_schema":
        text = json.dumps(document_of(wanted["json_schema"]["schema"], values_of(question)))
    elif wanted["type"] == "json_object":
        text = json.dumps(dict.fromkeys(re.findall(r"['\"`](\w+)['\"`]", question), "cats"))
    else:
        text = f"You said: {question}"
    said["content"] = cut_at_stop(text, body)
    return said


def cut_at_stop(text: str, body: Body) -> str:
    """The text without the first stop sequence and what follows it."""
    stop = body.get("stop") or []
    for sequence in [stop] if isinstance(stop, str) else stop:
        text = text.partition(sequence)[0]
    return text


def usage_of(asked: str, answered: str) -> Body:
    """Tokens are words."""
    prompt, completion = len(asked.split()), max(1, len(answered.split()))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": max(0, prompt - 1)},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


# -- how it goes over the wire ----------------------------------------------------------------


def chat_answer(body: Body) -> Body:
    """The answer to a body of `/v1/chat/completions`: one choice."""
    message = message_for(body)
    asked = " ".join(text_of(each) for each in body["messages"])
    answered = message["content"] or message["tool_calls"][0]["function"]["arguments"]
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    return {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "system_fingerprint": "fp_scripted",
        "choices": [choice],
        "usage": usage_of(asked, answered),
    }


def deltas_of(message: Body) -> Iterator[Body]:
    """A message in pieces."""
    yield {"role": "assistant", "content": ""}
    if "reasoning_content" in message:
        yield from (
            {"reasoning_content": piece} for piece in pieces_of(message["reasoning_content"])
        )
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        begin = {**call, "index": index, "function": {**function, "arguments": ""}}
        yield {"tool_calls": [begin]}
        for piece in pieces_of(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
    yield from ({"content": piece} for piece in pieces_of(message["content"] or ""))


def pieces_of(text: str) -> list[str]:
    """Words with the blanks before them."""
    return re.findall(r"\s*\S+|\s+$", text)


def events(body: Body, head: Body, choices: list[Body]) -> Iterator[str]:
    """A stream of choices, with usage if it is asked for."""
    usage = head.pop("usage")
    for choice in choices:
        yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
    if (body.get("stream_options") or {}).get("include_usage"):
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


def chat_events(body: Body) -> Iterator[str]:
    """The stream of a chat body."""
    head = chat_answer(body)
    (choice,) = head.pop("choices")
    head["object"] = "chat.completion.chunk"
    begin = {"index": 0, "logprobs": None}
    choices = [
        {**begin, "delta": delta, "finish_reason": None} for delta in deltas_of(choice["message"])
    ]
    end = {**begin, "delta": {}, "finish_reason": choice["finish_reason"]}
    return events(body, head, [*choices, end])


def completion_answer(body: Body) -> Body:
    """The answer to a body of `/v1/completions`: `n` texts for each prompt."""
    prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
    texts = [
        cut_at_stop(f" after {prompt.split()[-1]} ({number})", body)
        for prompt in prompts
        for number in range(body.get("n") or 1)
    ]
    return {
        "id": "cmpl-scripted",
        "object": "text_completion",
        "created": 1,
        "model": body["model"],
        "choices": [
            {"index": index, "text": text, "logprobs": None, "finish_reason": "stop"}
            for index, text in enumerate(texts)
        ],
        "usage": usage_of(" ".join(prompts), " ".join(texts)),
    }


def completion_events(body: Body) -> Iterator[str]:
    """The stream of a body with one prompt."""
    head = completion_answer(body)
    (choice,) = head.pop("choices")
    choices = [
        {**choice, "text": piece, "finish_reason": None} for piece in pieces_of(choice["text"])
    ]
    return events(body, head, [*choices, {**choice, "text": ""}])


class ScriptedModel(ScriptedUpstream):
    """The upstream that answers calls of these models by the rules."""

    models = (MODEL, OTHER_MODEL, THINKING_MODEL)

    @property
    def bodies(self) -> list[Body]:
        """Bodies of the calls up to now."""
        return [call.json for call in self.received]

    def unscripted(self, call: Received) -> Answer:
        """Answer a call by the rules."""
        body = call.json
        is_chat = call.target == "/v1/chat/completions"
        if body.get("stream"):
            events = chat_events(body) if is_chat else completion_events(body)
            return event_stream(*(event.encode() for event in events))
        return document(chat_answer(body) if is_chat else completion_answer(body))
