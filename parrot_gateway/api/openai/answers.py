"""What the answers of completions and chat have in common: envelope, usage, log-probabilities."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec
from parrot_engine.protocol import EngineInfo, TokenLogprobs
from parrot_engine.text import IncrementalDetokenizer, Tokenizer

from parrot_gateway import __version__
from parrot_gateway.api.event_stream import DONE, failure_events
from parrot_gateway.engines.usage import Usage
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.generation.generate import CollectedPrompt
from parrot_gateway.generation.placement import ServedModel
from parrot_gateway.generation.request import GenerationRequest, PromptFilled, TextToken, Update
from parrot_gateway.generation.requests.types import ChatBody, CompletionBody

#: OpenAI's sentinel for "very unlikely": JSON has no minus infinity.
VERY_UNLIKELY = -9999.0

encode = msgspec.json.Encoder().encode


class ChunkedAnswer(ABC):
    """The `Answer` of a chat or a completion: one object, or chunks that repeat its envelope.

    Only the delta itself is encoded for each chunk.

    Args:
        request: the call's.
        served: the model.
        model: as the caller named it.
        generation_request: as the engine gets it.
    """

    #: Of the id, of the whole answer, and of a chunk; how the JSON of a choice begins.
    _ID: ClassVar[str]
    _OBJECT: ClassVar[str]
    _CHUNK: ClassVar[str]
    _HEAD: ClassVar[bytes]

    def __init__(
        self,
        request: ChatBody | CompletionBody,
        served: ServedModel,
        model: str,
        generation_request: GenerationRequest,
    ) -> None:
        self._tokenizer = served.tokenizer
        #: Log-probabilities name tokens by id, as vLLM does: `token_id:42`.
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._generation_request = generation_request
        self._wants_ids = bool(request.return_token_ids)
        # A number in completions, where 0 asks for the chosen tokens alone; a flag in chats.
        self._wants_logprobs = request.logprobs is not None and request.logprobs is not False
        self._envelope: dict[str, Any] = {
            "id": f"{self._ID}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": system_fingerprint(served.info),
        }
        if isinstance(request, ChatBody) and request.service_tier is not None:
            # The tier that served the call, reported to callers that chose one.
            self._envelope["service_tier"] = "default"
        options = request.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        chunk = encode({"object": self._CHUNK, **self._envelope, "choices": []})
        #: A chunk up to and with the bracket that opens `choices`.
        self._chunk_head = b"data: " + chunk[: -len(b"]}")]
        self._chunk_tail = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"
        #: Usage so far, in every chunk; None leaves it to the last.
        self._usage: Usage | None = None
        if self._include_usage and options is not None and options.continuous_usage_stats:
            tokens = sum(len(prompt.token_ids) for prompt in generation_request.prompts)
            self._usage = Usage(tokens, 0, 0)
        count = len(generation_request.prompts) * generation_request.n
        self._heads = [self._HEAD % index for index in range(count)]

    def event(self, choice: bytes) -> bytes:
        if self._usage is not None:
            return self._chunk_head + choice + b'],"usage":' + self._usage_so_far() + b"}\n\n"
        return self._chunk_head + choice + self._chunk_tail

    def _usage_so_far(self) -> bytes:
        assert self._usage is not None
        return encode(usage_dict(self._usage))

    def events(self, update: Update) -> bytes:
        """See `Answer`."""
        if self._usage is not None:
            self._usage = _counted(self._usage, update)
        return self._events(update)

    @abstractmethod
    def _events(self, update: Update) -> bytes:
        """The events of an update."""

    def opening(self) -> bytes:
        return b""

    def closing(self, usage: Usage) -> bytes:
        """See `Answer`: with the usage, if `stream_options` include it."""
        if not self._include_usage:
            return DONE
        return self._chunk_head + b'],"usage":' + encode(usage_dict(usage)) + b"}\n\n" + DONE

    def failure(self, error: GatewayError) -> bytes:
        return failure_events(error)

    def whole(self, collected: Sequence[CollectedPrompt], usage: Usage) -> bytes:
        answer = {"object": self._OBJECT, **self._envelope, **self.choices(collected)}
        return encode(answer | {"usage": usage_dict(usage)})

    @abstractmethod
    def choices(self, collected: Sequence[CollectedPrompt]) -> dict[str, Any]:
        """`choices`, and further fields that depend on the call."""


def _counted(usage: Usage, update: Update) -> Usage:
    if isinstance(update, PromptFilled):
        return usage._replace(cached_tokens=usage.cached_tokens + update.cached_tokens)
    return usage._replace(completion_tokens=usage.completion_tokens + len(update.token_ids))


def system_fingerprint(info: EngineInfo) -> str:
    """Changes whenever the same seed may give other tokens: with model, engine and version."""
    parts = (info.model, info.kind, info.architecture, info.device, info.dtype, __version__)
    return "fp_" + hashlib.blake2b("\0".join(parts).encode(), digest_size=5).hexdigest()


def usage_dict(usage: Usage) -> dict[str, Any]:
    """`usage`; see `Usage` for how tokens are counted."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else VERY_UNLIKELY


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[TextToken], start: int = 0, *, as_ids: bool = False
) -> dict[str, list[Any]]:
    """`logprobs` of a completions choice.

    `text_offset` counts characters of the choice's `text`. `top_logprobs` has the chosen token
    besides the likeliest ones, as OpenAI's does. The end-of-text token that ended the choice is
    listed too: scoring harnesses count on one entry a token.

    Args:
        tokenizer: the model's.
        tokens: of the completion.
        start: characters of the echoed prompt.
        as_ids: tokens are named by their ids.
    """
    shape = _empty_completion_logprobs()
    for token in tokens:
        _append(shape, tokenizer, token.logprobs, start + token.offset, as_ids)
    return shape


def echoed_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    *,
    as_ids: bool = False,
    skip_special_tokens: bool = True,
) -> dict[str, list[Any]]:
    """The same for the tokens of an echoed prompt, of which the first has no log-probability.

    Args:
        skip_special_tokens: the echo is without them.
    """
    shape = _empty_completion_logprobs()
    offset = 0
    text = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    pieces = text.push_each(token_ids)
    for token_id, piece, entry in zip(token_ids, pieces, logprobs, strict=True):
        if entry is None:
            shape["tokens"].append(_named(tokenizer, token_id, as_ids))
            shape["token_logprobs"].append(None)
            shape["top_logprobs"].append(None)
            shape["text_offset"].append(offset)
        else:
            _append(shape, tokenizer, entry, offset, as_ids)
        offset += len(piece)
    return shape


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {key: first[key] + second[key] for key in first}


def _empty_completion_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _named(tokenizer: Tokenizer, token_id: int, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)


def _append(
    shape: dict[str, list[Any]],
    tokenizer: Tokenizer,
    entry: TokenLogprobs,
    offset: int,
    as_ids: bool,
) -> None:
    text, logprob = _named(tokenizer, entry.token_id, as_ids), finite(entry.logprob)
    shape["tokens"].append(text)
    shape["token_logprobs"].append(logprob)
    top: dict[str, float] = {}
    for token_id, value in entry.top:
        # NOTE: two ids may have one text; the likelier comes first and stays.
        top.setdefault(_named(tokenizer, token_id, as_ids), finite(value))
    top.setdefault(text, logprob)
    shape["top_logprobs"].append(top)
    shape["text_offset"].append(offset)


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[TextToken], *, as_ids: bool = False
) -> dict[str, Any]:
    """`logprobs` of a chat choice: the tokens of its text, without the one that ended it."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return _chat_entry(tokenizer, token_id, logprob, as_ids)

    return {
        "content": [
            {
                **entry(token.logprobs.token_id, token.logprobs.logprob),
                "top_logprobs": [entry(*top) for top in token.logprobs.top],
            }
            for token in tokens
            if not token.is_end
        ],
        "refusal": None,
    }


def _chat_entry(
    tokenizer: Tokenizer, token_id: int, logprob: float, as_ids: bool
) -> dict[str, Any]:
    raw = _named(tokenizer, token_id, True).encode() if as_ids else tokenizer.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}
