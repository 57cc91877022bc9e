"""The tokens of a message for a model of an upstream that speaks OpenAI's API, which is asked.

Servers of open models tokenize chats (`/tokenize`, outside of `/v1`), and some count the tokens of
messages themselves; hosted APIs do neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import msgspec

from parrot_gateway.backends.upstreams.answer import MAX_HELD_BYTES, rewrite
from parrot_gateway.backends.upstreams.client import TOKENIZE, UpstreamClient, UpstreamRequest
from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.exceptions import DeadlineError, UnsupportedError, UpstreamError

_COUNT = "/v1/messages/count_tokens"


class _Counted(msgspec.Struct):
    count: int | None = None
    input_tokens: int | None = None


_DECODER = msgspec.json.Decoder(_Counted)


async def count_on_upstream(
    upstream: UpstreamClient,
    model: str,
    received: CallRequest,
    chat: CallRequest,
    headers: Iterable[tuple[bytes, bytes]],
    timeout_s: float,
) -> int:
    """The length of a message's prompt.

    Args:
        model: the name that the upstream knows.
        received: the request as it came.
        chat: what it becomes for the upstream.
        headers: the client's, as an OpenAI-compatible server reads them.

    Raises:
        UnsupportedError: the upstream counts no tokens.
        UpstreamError, OverloadedError: it could not be asked.
        DeadlineError: it took too long.
    """
    given, answers = list(headers), []
    try:
        async with asyncio.timeout(timeout_s):
            for path, body in _questions(model, received, chat):
                status, counted = await _ask(upstream, path, body, given)
                if counted is not None:
                    return counted
                answers.append(f"its {path} answered {status}")
    except TimeoutError:
        raise DeadlineError(f"The call took longer than {timeout_s:g} s.") from None
    raise UnsupportedError(
        f"The model '{received.model}' belongs to the upstream '{upstream.name}', whose tokenizer "
        f"this gateway does not have, and which counts no tokens: {' and '.join(answers)}. They "
        "are counted by vLLM and SGLang, by upstreams that speak Anthropic's API (setting "
        "upstreams.api), and for models of this gateway's own engines.",
        param="model",
    )


def _questions(model: str, received: CallRequest, chat: CallRequest) -> Iterator[tuple[str, bytes]]:
    """Paths and bodies, in the order in which they are tried."""
    fields = {name: chat.fields[name] for name in ("messages", "tools") if name in chat.fields}
    last = msgspec.json.decode(fields["messages"])[-1]
    continues = last["role"] == "assistant" and not last.get("tool_calls")
    more = {"add_generation_prompt": not continues, "continue_final_message": continues}
    yield TOKENIZE, msgspec.json.encode({"model": model, **fields, **more})
    yield _COUNT, rewrite(received.body, model)


async def _ask(
    upstream: UpstreamClient, path: str, body: bytes, headers: list[tuple[bytes, bytes]]
) -> tuple[int, int | None]:
    """The status of the answer, and the number in it."""
    response = await upstream.request(UpstreamRequest("POST", path, headers, body))
    try:
        held = bytearray(response.first)
        while not response.at_eof:
            held += await response.read()
            if len(held) > MAX_HELD_BYTES:
                raise UpstreamError(f"The answer of the upstream '{upstream.name}' is too long.")
    finally:
        response.close()
    if response.status != 200:
        return response.status, None
    try:
        answer = _DECODER.decode(bytes(held))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return response.status, None
    return response.status, answer.count if answer.input_tokens is None else answer.input_tokens
