"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service
from tokenizers import Tokenizer as Backend

from parrot_gateway.calls.requests.types import MAX_DETOKENIZED


async def test_prompt(service: Service, engine: ScriptedRemoteEngine) -> None:
    status, answer = await service.ask(
        "/tokenize", {"prompt": "Hello 😀", "return_token_strs": True}
    )
    assert status == 200
    assert answer["tokens"] == engine.tokenizer.encode("Hello 😀")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == engine.info.max_context_tokens
    # As the vocabulary has them, and vLLM answers: bytes and blanks in its own code.
    vocabulary = Backend.from_str(engine.tokenizer.assets.tokenizer_json)
    assert answer["token_strs"] == [vocabulary.id_to_token(token) for token in answer["tokens"]]
    assert answer["token_strs"][0] == "Hello"


async def test_chat_counts_as_the_completion_does(service: Service) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    _, answer = await service.ask("/tokenize", {"messages": messages})
    _, chat = await service.ask("/v1/chat/completions", {"model": "m", "messages": messages})
    assert answer["count"] == chat["usage"]["prompt_tokens"]
    assert answer["token_strs"] is None


@pytest.mark.parametrize("text", ["Hello world", "", "\0", "a<|im_end|>b", "é😀\n"])
async def test_round_trip(service: Service, text: str) -> None:
    _, answer = await service.ask("/tokenize", {"prompt": text})
    status, back = await service.ask("/detokenize", {"tokens": answer["tokens"]})
    assert (status, back) == (200, {"prompt": text})


async def test_special_tokens_can_be_left_out(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    tokens = engine.text("a")
    _, answer = await service.ask("/detokenize", {"tokens": tokens, "skip_special_tokens": True})
    assert answer == {"prompt": "a"}


async def test_many_tokens_are_detokenized_up_to_a_bound(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    tokens = engine.text("the quick fox", end=False)
    times = MAX_DETOKENIZED // len(tokens)
    status, answer = await service.ask("/detokenize", {"tokens": tokens * times})
    assert (status, answer["prompt"]) == (200, "the quick fox" * times)
    status, answer = await service.ask("/detokenize", {"tokens": [1] * (MAX_DETOKENIZED + 1)})
    assert (status, answer["error"]["param"]) == (400, "tokens")
    assert answer["error"]["code"] == "array_above_max_length"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", b"nonsense", None),
    ],
)
async def test_bad_bodies(service: Service, path: str, body: Any, param: str | None) -> None:
    status, answer = await service.ask(path, body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_tools_of_a_chat_count(service: Service) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    _, answer = await service.ask("/tokenize", chat)
    _, completion = await service.ask("/v1/chat/completions", chat)
    assert answer["count"] == completion["usage"]["prompt_tokens"]
    status, refusal = await service.ask("/tokenize", {**chat, "tools": [{}]})
    assert (status, refusal["error"]["param"]) == (400, "tools[0].type")
