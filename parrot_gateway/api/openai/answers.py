"""Answers of `/v1/completions` and `/v1/chat/completions` by models of own engines: whole, or as
events."""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from parrot_engine.protocol import EngineInfo

from parrot_gateway import __version__
from parrot_gateway.api.event_stream import DONE, failure_events
from parrot_gateway.api.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
)
from parrot_gateway.backends.own.generate import Candidate, CollectedPrompt
from parrot_gateway.calls.generation_request import (
    CLOSED,
    ChoiceDelta,
    GenerationRequest,
    PromptFilled,
    Update,
)
from parrot_gateway.calls.metadata import ServedModel
from parrot_gateway.calls.requests.types import ChatBody, CompletionBody
from parrot_gateway.calls.tools.parsing import ContentPiece, ToolCallBegin, ToolPiece
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import GatewayError

encode = msgspec.json.Encoder().encode
_CLOSED_FIELD = b"," + encode(CLOSED)[1:-1]


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
            "id": f"{self._ID}-{os.urandom(16).hex()}",
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

    def _count(self, update: Update) -> None:
        """Count the tokens of an update, where usage goes into every chunk."""
        usage = self._usage
        if isinstance(update, PromptFilled):
            if usage is not None:
                self._usage = usage._replace(
                    cached_tokens=usage.cached_tokens + update.cached_tokens
                )
        elif usage is not None:
            tokens = usage.completion_tokens + len(update.token_ids)
            self._usage = usage._replace(completion_tokens=tokens)

    @abstractmethod
    def events(self, update: Update) -> bytes:
        """See `Answer`."""

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


class ChatAnswer(ChunkedAnswer):
    """The answer of one chat; arguments as of `ChunkedAnswer`."""

    _ID, _OBJECT, _CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _HEAD = b'{"index":%d,"delta":'

    @property
    def _calls_only(self) -> bool:
        tools = self._generation_request.tools
        return tools is not None and tools.calls_only

    def opening(self) -> bytes:
        """See `Answer`: the role of every choice, in the order that clients count on."""
        content = b"null" if self._calls_only else b'""'
        return b"".join(
            self.event(
                head + b'{"role":"assistant","content":' + content + b',"refusal":null},'
                b'"logprobs":null,"finish_reason":null}'
            )
            for head in self._heads
        )

    def events(self, update: Update) -> bytes:
        """See `Answer`: the text of the update, then its finish reason."""
        if self._usage is not None:
            self._count(update)
        if isinstance(update, PromptFilled):
            return b""
        head, events = self._heads[update.choice], b""
        if update.reasoning:
            thought = {"reasoning_content": update.reasoning, "reasoning": update.reasoning}
            tail = b',"logprobs":null,"finish_reason":null}'
            events = self.event(head + encode(thought) + tail)
        if update.pieces is not None:
            return events + self._tool_events(update, update.pieces)
        wants_ids = self._wants_ids and update.token_ids
        shown = update.text or any(not token.is_end for token in update.tokens)
        if shown or wants_ids:
            logprobs = b"null"
            if self._wants_logprobs:
                logprobs = encode(
                    chat_logprobs(self._tokenizer, update.tokens, as_ids=self._as_ids)
                )
            events += self.event(
                b'%s{"content":%s},"logprobs":%s,"finish_reason":null%s}'
                % (
                    head,
                    encode(update.text),
                    logprobs,
                    b',"token_ids":' + encode(update.token_ids) if wants_ids else b"",
                )
            )
        return events + self._end(update)

    def _end(self, update: ChoiceDelta) -> bytes:
        """The last event of a choice, with the update that ends it."""
        if update.finish_reason is None:
            return b""
        return self.event(
            b'%s{},"logprobs":null,"finish_reason":"%s"%s}'
            % (
                self._heads[update.choice],
                update.finish_reason.encode(),
                _CLOSED_FIELD if update.is_closed else b"",
            )
        )

    def _tool_events(self, update: ChoiceDelta, pieces: Sequence[ToolPiece]) -> bytes:
        """The same where tools may be called: content and pieces of calls, one event each."""
        head = self._heads[update.choice]
        deltas = [encode(delta_of(piece)) for piece in pieces]
        extra = b'"logprobs":null,"finish_reason":null'
        shown = any(not token.is_end for token in update.tokens)
        if self._wants_ids and update.token_ids:
            extra += b',"token_ids":' + encode(update.token_ids)
        elif not shown and not deltas:
            deltas, extra = [], b""
        if self._wants_logprobs and shown:
            logprobs = encode(chat_logprobs(self._tokenizer, update.tokens, as_ids=self._as_ids))
            extra = extra.replace(b'"logprobs":null', b'"logprobs":' + logprobs, 1)
        if extra and not deltas:
            # Held back as text, but reported as tokens.
            deltas = [b"{}"]
        events = b""
        for delta in deltas:
            events += self.event(b"%s%s,%s}" % (head, delta, extra))
            extra = b'"logprobs":null,"finish_reason":null'
        return events + self._end(update)

    def choices(self, collected: Sequence[CollectedPrompt]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, candidate in enumerate(collected[0].candidates):
            logprobs = None
            if self._wants_logprobs:
                logprobs = chat_logprobs(self._tokenizer, candidate.tokens, as_ids=self._as_ids)
            content = {"message": self._message(candidate)}
            choices.append(_choice(index, content, logprobs, candidate, with_ids=self._wants_ids))
        if not self._wants_ids:
            return {"choices": choices}
        token_ids = self._generation_request.prompts[0].token_ids
        return {"choices": choices, "prompt_token_ids": token_ids}

    def _message(self, candidate: Candidate) -> dict[str, Any]:
        content: str | None = candidate.text
        if (candidate.calls or self._calls_only) and not candidate.text.strip():
            content = None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if candidate.reasoning:
            thought = "".join(candidate.reasoning)
            message |= {"reasoning_content": thought, "reasoning": thought}
        if candidate.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in candidate.calls
            ]
        return message


class CompletionAnswer(ChunkedAnswer):
    """The answer of one completion; arguments as of `ChunkedAnswer`.

    Choice `prompt * n + j` is the j-th of its prompt.
    """

    _ID, _OBJECT, _CHUNK = "cmpl", "text_completion", "text_completion"
    _HEAD = b'{"index":%d,"text":'

    def events(self, update: Update) -> bytes:
        if self._usage is not None:
            self._count(update)
        if isinstance(update, PromptFilled):
            return self._prompt_events(update)
        wants_ids = self._wants_ids
        shown = update.text or update.tokens or (wants_ids and update.token_ids)
        if not shown and update.finish_reason is None:
            return b""
        logprobs = b"null"
        if self._wants_logprobs:
            start = len(self._echo(update.prompt))
            logprobs = encode(
                completion_logprobs(self._tokenizer, update.tokens, start, as_ids=self._as_ids)
            )
        extra = b',"token_ids":' + encode(update.token_ids) if wants_ids else b""
        if update.is_closed:
            extra += _CLOSED_FIELD
        return self.event(
            self._choice(
                update.prompt * self._generation_request.n + update.choice,
                update.text,
                logprobs,
                update.finish_reason,
                extra,
            )
        )

    def _echo(self, prompt: int) -> str:
        echoes = self._generation_request.echoes
        return "" if echoes is None else echoes[prompt]

    def _prompt_events(self, update: PromptFilled) -> bytes:
        """The echo of a prompt, once for each of its choices; the end of what only was filled."""
        ends = self._generation_request.sampling.max_tokens == 0
        if self._generation_request.echoes is None and not ends:
            return b""
        text = self._echo(update.prompt)
        logprobs = b"null"
        if self._wants_logprobs:
            logprobs = encode(self._prompt_logprobs(update))
        first = update.prompt * self._generation_request.n
        finish_reason = "length" if ends else None
        return b"".join(
            self.event(self._choice(index, text, logprobs, finish_reason, b""))
            for index in range(first, first + self._generation_request.n)
        )

    def _choice(
        self, index: int, text: str, logprobs: bytes, finish_reason: str | None, extra: bytes
    ) -> bytes:
        reason = b"null" if finish_reason is None else b'"%s"' % finish_reason.encode()
        return b'%s%s,"logprobs":%s,"finish_reason":%s%s}' % (
            self._heads[index],
            encode(text),
            logprobs,
            reason,
            extra,
        )

    def _prompt_logprobs(self, update: PromptFilled) -> dict[str, list[Any]]:
        if update.logprobs is None:
            return completion_logprobs(self._tokenizer, ())
        prompt = self._generation_request.prompts[update.prompt]
        return echoed_logprobs(
            self._tokenizer,
            prompt.token_ids,
            update.logprobs,
            as_ids=self._as_ids,
            skip_special_tokens=prompt.text is not None,
        )

    def choices(self, collected: Sequence[CollectedPrompt]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for prompt, entry in enumerate(collected):
            echo = self._echo(prompt)
            for candidate in entry.candidates:
                logprobs = None
                if self._wants_logprobs:
                    logprobs = completion_logprobs(
                        self._tokenizer, candidate.tokens, len(echo), as_ids=self._as_ids
                    )
                    if self._generation_request.echoes is not None and entry.filled is not None:
                        logprobs = joined(self._prompt_logprobs(entry.filled), logprobs)
                content = {"text": echo + candidate.text}
                choice = _choice(
                    len(choices), content, logprobs, candidate, with_ids=self._wants_ids
                )
                if self._wants_ids:
                    choice["prompt_token_ids"] = self._generation_request.prompts[prompt].token_ids
                choices.append(choice)
        return {"choices": choices}


def _choice(
    index: int, content: dict[str, Any], logprobs: Any, candidate: Candidate, *, with_ids: bool
) -> dict[str, Any]:
    """One choice of a whole answer."""
    choice = {
        "index": index,
        **content,
        "logprobs": logprobs,
        "finish_reason": candidate.finish_reason,
    }
    if candidate.is_closed:
        choice |= CLOSED
    if with_ids:
        choice["token_ids"] = candidate.token_ids
    return choice


def delta_of(piece: ToolPiece) -> dict[str, Any]:
    if isinstance(piece, ContentPiece):
        return {"content": piece.text}
    if isinstance(piece, ToolCallBegin):
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.call, "id": piece.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}


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
