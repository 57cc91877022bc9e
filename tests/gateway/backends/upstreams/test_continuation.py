"""Requests for the rest of an answer, and the reasons why there is none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from parrot_gateway.backends.upstreams.continuation import (
    ContinuationStyle,
    ContinuedAnswer,
    PartialAnswer,
    fault_of,
)
from parrot_gateway.calls.generation_request import ChoiceDelta
from parrot_gateway.calls.observer import GenerationObserver
from parrot_gateway.calls.requests.call import CallKind, CallRequest
from parrot_gateway.calls.tools.parsing import ContentPiece, ToolCallBegin
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import (
    AnswerError,
    MalformedAnswerError,
    UpstreamError,
    UpstreamTimeoutError,
)

CHAT: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "messages": [{"role": "user", "content": "?"}],
}
COMPLETION: dict[str, Any] = {"model": "m", "stream": True, "prompt": "Once"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}


def delta(text: str = "", **more: Any) -> ChoiceDelta:
    return ChoiceDelta(0, more.pop("choice", 0), text, [], [], None, **more)


def partial(body: dict[str, Any], *texts: str, usage: Usage | None = None) -> PartialAnswer:
    kind: CallKind = "completions" if "prompt" in body else "chat"
    answer = PartialAnswer(CallRequest(kind, msgspec.json.encode(body)))
    for text in texts:
        answer.delta(delta(text))
    answer.broke_off(usage)
    return answer


def continued(answer: PartialAnswer, style: ContinuationStyle = "prefill") -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(answer.continuation(style).request.body)
    return fields


class Kept(GenerationObserver):
    def __init__(self) -> None:
        self.deltas: list[ChoiceDelta] = []
        self.usage: Usage | None = None

    def delta(self, delta: ChoiceDelta) -> None:
        self.deltas.append(delta)

    def ended(self, usage: Usage | None, finish_reason: str | None = None) -> None:
        self.usage = usage


def test_each_style_puts_the_text_into_the_request() -> None:
    given = {"role": "assistant", "content": "Hello,"}
    for style, message, more in (
        ("prefill", given, {}),
        ("prefix", {**given, "prefix": True}, {}),
        ("continue_final_message", given,
         {"continue_final_message": True, "add_generation_prompt": False}),
    ):  # fmt: skip
        body = continued(partial(CHAT, "Hel", "lo, "), style)  # type: ignore[arg-type]
        assert body == {**CHAT, **more, "messages": [*CHAT["messages"], message]}
    body = continued(partial({**COMPLETION, "max_tokens": 9}, " upon", " a"))
    assert body == {**COMPLETION, "prompt": "Once upon a", "max_tokens": 7}
    assert continued(partial({**COMPLETION, "prompt": ["Once"]}, " a"))["prompt"] == "Once a"


def test_an_answer_that_has_said_nothing_is_asked_for_again() -> None:
    request = {**CHAT, "response_format": FORMAT, "tool_choice": "required", "max_tokens": 1}
    answer = partial(request, " ", "\n")
    assert (answer.obstacle(), answer.is_at_limit) == (None, False)
    assert continued(answer) == request
    last = Usage(5, 6, 0)
    assert answer.usage_of(last) == last


def test_a_message_that_the_caller_has_begun_is_continued() -> None:
    begun = [*CHAT["messages"], {"role": "assistant", "content": "Hel"}]
    request = {**CHAT, "messages": begun, "continue_final_message": True,
               "add_generation_prompt": False}  # fmt: skip
    body = continued(partial(request, "lo", " w"), "continue_final_message")
    assert body == {**request, "messages": [begun[0], {"role": "assistant", "content": "Hello w"}]}


def test_limits_are_lowered_by_what_was_generated() -> None:
    limits = {"max_tokens": 10, "max_completion_tokens": 8, "min_tokens": 3}
    body = continued(partial({**CHAT, **limits}, "a", "b"))
    assert [body[name] for name in limits] == [8, 6, 1]
    body = continued(partial({**CHAT, **limits}, "a", "b", usage=Usage(4, 7, 0)))
    assert [body[name] for name in limits] == [3, 1, 0]
    assert partial({**CHAT, "max_tokens": 2}, "a", "b").is_at_limit
    assert not partial({**CHAT, "max_tokens": 3}, "a", "b").is_at_limit
    # A completion without a limit has the default of OpenAI's API.
    assert continued(partial(COMPLETION, "a", "b"))["max_tokens"] == 14
    assert "max_tokens" not in continued(partial(COMPLETION, *("a" * 16)))
    assert "max_tokens" not in continued(partial(CHAT, "a"))


@pytest.mark.parametrize(
    ("body", "obstacle"),
    [
        ({**CHAT, "n": 2}, "several candidates"),
        ({**COMPLETION, "best_of": 2}, "several candidates"),
        ({**CHAT, "logprobs": True}, "log-probabilities"),
        ({**COMPLETION, "logprobs": 0}, "log-probabilities"),
        ({**CHAT, "return_token_ids": True}, "token ids"),
        ({**CHAT, "modalities": ["text", "audio"]}, "audio"),
        ({**COMPLETION, "echo": True}, "an echoed prompt or several"),
        ({**COMPLETION, "prompt": ["a", "b"]}, "an echoed prompt or several"),
        ({**COMPLETION, "prompt": [[1, 2]]}, "a prompt of token ids"),
        ({**COMPLETION, "suffix": "."}, "a suffix"),
        ({**CHAT, "response_format": FORMAT}, "a grammar"),
        ({**CHAT, "guided_regex": "a+"}, "a grammar"),
        ({**CHAT, "tools": [{}], "tool_choice": "required"}, "a grammar"),
        ({**CHAT, "response_format": {"type": "text"}}, None),
        ({**CHAT, "n": 1, "logprobs": False, "tools": [{}], "tool_choice": "auto"}, None),
        ({**CHAT, "tools": [{}]}, None),
    ],
)
def test_only_plain_text_can_be_continued(body: dict[str, Any], obstacle: str | None) -> None:
    assert partial(body, "text").obstacle() == obstacle


def test_tool_calls_and_reasoning_alone_cannot_be_continued() -> None:
    answer = partial(CHAT)
    answer.delta(delta(pieces=[ToolCallBegin(0, "f", "call_1")]))
    assert answer.obstacle() == "a tool call"
    answer = partial(CHAT)
    answer.delta(delta(reasoning="Hm."))
    assert answer.obstacle() == "reasoning"
    answer.delta(delta("Yes"))
    assert answer.obstacle() is None
    body = continued(answer, "continue_final_message")
    assert body["messages"][-1] == {
        "role": "assistant", "content": "Yes", "reasoning_content": "Hm.",
    }  # fmt: skip
    answer.delta(delta("other", choice=1))
    assert answer.obstacle() == "several candidates"


def test_what_follows_is_reported_as_the_rest_of_one_answer() -> None:
    answer, kept = partial(CHAT, "Well, ", "so"), Kept()
    rest = ContinuedAnswer(answer, answer.continuation("prefill").seam, kept, str)
    rest.delta(delta(""))
    rest.delta(delta(" it", reasoning="once more"))
    rest.delta(delta(" goes", pieces=[ContentPiece(" goes")]))
    rest.delta(delta(pieces=[ToolCallBegin(0, "f", "call_1")])._replace(finish_reason="tool_calls"))
    rest.ended(Usage(12, 3, 11), "tool_calls")
    assert [(each.content, each.reasoning) for each in kept.deltas] == [
        (" it", ""), (" goes", ""), ("", ""),
    ]  # fmt: skip
    assert answer.text == "Well, so it goes"
    assert kept.deltas[-1].pieces == [ToolCallBegin(0, "f", "call_1")]
    # Ten tokens of prompt and two of text were sent to the second server.
    assert kept.usage == Usage(10, 5, 10)


def test_usage_that_was_reported_on_the_way_counts() -> None:
    answer = partial(CHAT, "a", "b", usage=Usage(7, 3, 0))
    answer.delta(delta("c"))
    answer.broke_off(Usage(11, 2, 4))
    assert answer.usage_of(Usage(14, 1, 12)) == Usage(7, 6, 7)
    assert answer.usage_of(None) is None


def test_a_fault_is_known_by_its_error() -> None:
    assert fault_of(UpstreamError("cut")) == "transport_error"
    assert fault_of(UpstreamTimeoutError("silent")) == "read_timeout"
    assert fault_of(MalformedAnswerError("no JSON")) == "malformed"
    assert fault_of(AnswerError("theirs")) == "in_band_error"
