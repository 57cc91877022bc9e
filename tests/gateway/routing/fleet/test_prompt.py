"""The prompt that is read from requests for servers of an upstream."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from parrot_gateway.routing.fleet.prompt import BLOCK_TOKENS, UpstreamPrompt, read_prompt

CHAT = "/v1/chat/completions"


def message(role: str, words: int) -> dict[str, Any]:
    return {"role": role, "content": "".join(f"{role}{number} " for number in range(words))}


def read(body: dict[str, Any], path: str = CHAT, salt: str = "") -> UpstreamPrompt:
    return read_prompt(path, msgspec.json.encode({"model": "m", **body}), salt)


def shared(one: UpstreamPrompt, other: UpstreamPrompt) -> int:
    """Blocks at which both are the same."""
    return sum(a == b for a, b in zip(one.prefix, other.prefix, strict=False))


def test_a_longer_conversation_begins_with_the_shorter_one() -> None:
    messages = [message("system", 300), message("user", 100)]
    first = read({"messages": messages})
    messages += [message("assistant", 50), message("user", 50)]
    second = read({"messages": messages})
    assert shared(first, second) == len(first.prefix) > 3
    assert len(second.prefix) == second.tokens // BLOCK_TOKENS
    assert (first.is_answered, second.is_answered) == (False, True)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [message("user", 400)]},
    ],
)
def test_other_prompts_share_nothing(other: dict[str, Any]) -> None:
    body = {"messages": [message("system", 400)]}
    assert shared(read(body), read(body | other)) == 0


def test_tenants_share_nothing() -> None:
    body = {"messages": [message("system", 400)]}
    assert shared(read(body), read(body, salt="other")) == 0


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/completions", {"prompt": "word " * 1000}, 1250),
        ("/v1/responses", {"instructions": "a" * 400, "input": "b" * 400}, 200),
        ("/v1/messages", {"system": "a" * 400, "messages": [message("user", 0)]}, 108),
        ("/v1/embeddings", {"input": ["a" * 400]}, 100),
    ],
)
def test_prompts_of_other_routes(path: str, body: dict[str, Any], tokens: int) -> None:
    assert read(body, path).tokens == pytest.approx(tokens, abs=4)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, {}, 1024),
        (CHAT, {"max_tokens": 7}, 7),
        (CHAT, {"max_tokens": 9, "max_completion_tokens": 8}, 8),
        (CHAT, {"max_tokens": 100_000}, 4096),
        (CHAT, {"max_tokens": "many"}, 1024),
        ("/v1/responses", {"max_output_tokens": 5}, 5),
        ("/v1/embeddings", {"max_tokens": 7}, 1),
    ],
)
def test_how_much_is_generated(path: str, body: dict[str, Any], expected: int) -> None:
    assert read(body, path).max_tokens == expected


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"\xff", b"--boundary\r\n", b'{"messages": ' + b"[" * 5000]
)
def test_what_is_no_json_object_has_no_known_prompt(body: bytes) -> None:
    assert read_prompt(CHAT, body, "") == UpstreamPrompt()


def test_the_end_of_a_very_long_prompt_does_not_count() -> None:
    long = read({"messages": [{"role": "user", "content": "x" * 5_000_000}]})
    assert len(long.prefix) * BLOCK_TOKENS == long.tokens == 2048 * BLOCK_TOKENS


@pytest.mark.parametrize("value", [None, "x", [], 0, -3, True])
def test_fields_of_other_types_count_as_left_out(value: Any) -> None:
    names = ("n", "stream", "store", "max_tokens")
    prompt = read(dict.fromkeys(names, value) | {"messages": [message("user", 1)]})
    assert prompt.sequences == 1
    assert prompt.is_stream == (value is True)
