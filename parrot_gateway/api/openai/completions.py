"""Answers of `POST /v1/completions` by models of own engines: whole, or as events.

Choice `prompt * n + j` is the j-th of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parrot_gateway.api.openai.answers import (
    ChunkedAnswer,
    completion_logprobs,
    echoed_logprobs,
    encode,
    joined,
)
from parrot_gateway.generation.generate import CollectedPrompt
from parrot_gateway.generation.request import PromptFilled, Update


class CompletionAnswer(ChunkedAnswer):
    """The answer of one completion; arguments as of `ChunkedAnswer`."""

    _ID, _OBJECT, _CHUNK = "cmpl", "text_completion", "text_completion"
    _HEAD = b'{"index":%d,"text":'

    def _events(self, update: Update) -> bytes:
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
        return self.event(
            self._choice(
                update.prompt * self._generation_request.n + update.choice,
                update.text,
                logprobs,
                update.finish_reason,
                b',"token_ids":' + encode(update.token_ids) if wants_ids else b"",
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
                choice: dict[str, Any] = {
                    "index": len(choices),
                    "text": echo + candidate.text,
                    "logprobs": logprobs,
                    "finish_reason": candidate.finish_reason,
                }
                if self._wants_ids:
                    choice["token_ids"] = candidate.token_ids
                    choice["prompt_token_ids"] = self._generation_request.prompts[prompt].token_ids
                choices.append(choice)
        return {"choices": choices}
