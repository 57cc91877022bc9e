"""Answers of `POST /v1/chat/completions` by models of own engines: whole, or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parrot_gateway.api.openai.answers import ChunkedAnswer, chat_logprobs, encode
from parrot_gateway.generation.generate import Candidate, CollectedPrompt
from parrot_gateway.generation.request import ChoiceDelta, PromptFilled, Update
from parrot_gateway.generation.tools.parsing import CallBegin, ContentPiece, ToolPiece


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

    def _events(self, update: Update) -> bytes:
        """See `Answer`: the text of the update, then its finish reason."""
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
        if update.finish_reason is not None:
            events += self.event(
                b'%s{},"logprobs":null,"finish_reason":"%s"}'
                % (head, update.finish_reason.encode())
            )
        return events

    def _tool_events(self, update: ChoiceDelta, pieces: Sequence[ToolPiece]) -> bytes:
        """The same where tools may be called: content and pieces of calls, one event each."""
        head = self._heads[update.choice]
        deltas = [encode(_delta_of(piece)) for piece in pieces]
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
        if update.finish_reason is not None:
            reason = update.finish_reason.encode()
            events += self.event(b'%s{},"logprobs":null,"finish_reason":"%s"}' % (head, reason))
        return events

    def choices(self, collected: Sequence[CollectedPrompt]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, candidate in enumerate(collected[0].candidates):
            logprobs = None
            if self._wants_logprobs:
                logprobs = chat_logprobs(self._tokenizer, candidate.tokens, as_ids=self._as_ids)
            choice: dict[str, Any] = {
                "index": index,
                "message": self._message(candidate),
                "logprobs": logprobs,
                "finish_reason": candidate.finish_reason,
            }
            if self._wants_ids:
                choice["token_ids"] = candidate.token_ids
            choices.append(choice)
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


def _delta_of(piece: ToolPiece) -> dict[str, Any]:
    if isinstance(piece, ContentPiece):
        return {"content": piece.text}
    if isinstance(piece, CallBegin):
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.call, "id": piece.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}
