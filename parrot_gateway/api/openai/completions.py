"""`POST /v1/completions` for models of our own engines.

All four forms of a prompt, batched in order: choice `prompt * n + j` is the j-th of its prompt.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
from parrot_engine.text import Tokenizer

from parrot_gateway.api.openai.answers import (
    ChunkWriter,
    Envelope,
    completion_logprobs,
    echoed_logprobs,
    encode,
    joined,
    usage_dict,
)
from parrot_gateway.api.openai.sse import stream_generation
from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.generation.collect import Outcome, collect, hand_over
from parrot_gateway.generation.generate import Generation
from parrot_gateway.generation.placement import Placer, ServedModel
from parrot_gateway.generation.prompts import prompts_of_texts, start_token
from parrot_gateway.generation.request import (
    GenerationRequest,
    Prompt,
    PromptFilled,
    Update,
)
from parrot_gateway.generation.requests.grammars import requested_grammar
from parrot_gateway.generation.requests.types import CompletionBody, Prompts
from parrot_gateway.generation.requests.validation import (
    check_context,
    check_range,
    check_sampling,
    check_token_ids,
    decode,
    may_be_too_long,
    refuse,
    sampling_of,
)
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.settings.model import ServerSettings

#: OpenAI's default.
DEFAULT_MAX_TOKENS = 16
MAX_BEST_OF = 20
MAX_LOGPROBS = 5
#: Prompts of one call, and candidates of all of them together.
MAX_PROMPTS = 2048
MAX_CANDIDATES = 4096

_DECODER = msgspec.json.Decoder(CompletionBody)


async def handle_completions(
    exchange: Exchange,
    placer: Placer,
    requested_model: str,
    body: bytes,
    server: ServerSettings,
    *,
    salt: str = "",
) -> None:
    """Answer one call.

    A client that goes away cancels it: the current task is cancelled, and the engine's contexts
    are freed on the way out.

    Args:
        exchange: its body has been read, and is `body`.
        placer: the engines of the model.
        requested_model: answered as `model`, whatever the engine calls it.
        body: JSON.
        server: deadlines.
        salt: prefixes are shared only under the same one.

    Raises:
        GatewayError: nothing has been sent yet; a stream's later failures are told in band.
    """
    request = decode(body, _DECODER)
    _check(request, placer)
    exchange.cancel_on_disconnect(cast(asyncio.Task[Any], asyncio.current_task()))
    prompts = await _prompts(request, placer)
    generation_request = _generation_request(request, placer, prompts, salt)
    generation = Generation(placer, generation_request, exchange.started + server.call_timeout_s)
    answer = _Answer(request, placer, requested_model, generation_request)
    if exchange.reader is not None:
        echo = answer.echoes[0] if answer.echoes is not None else ""
        await hand_over(generation, exchange.reader, best_of=generation_request.best_of, echo=echo)
        return
    if request.stream:
        await stream_generation(
            exchange,
            generation,
            keep_alive_s=server.keep_alive_s,
            opening=b"",
            encode=answer.events,
            closing=lambda: answer.writer.usage(generation.state.usage),
        )
        return
    with generation:
        outcomes = await collect(generation, len(prompts), generation_request.best_of)
    content = answer.whole(outcomes) | {"usage": usage_dict(generation.state.usage)}
    await exchange.respond(200, encode(content))


def check_completions(body: bytes, served: ServedModel) -> None:
    """Everything that can be said of a body before its prompt is final.

    Raises:
        InvalidRequestError: a field is wrong, or this model cannot honour it.
    """
    _check(decode(body, _DECODER), served)


async def check_completions_fit(body: bytes, served: ServedModel) -> None:
    """What can be said once the prompt is final.

    Raises:
        ContextLengthError: it does not fit.
        InvalidRequestError: it cannot be a prompt.
    """
    request = decode(body, _DECODER)
    if may_be_too_long(body, request, served.info):
        _generation_request(request, served, await _prompts(request, served), "")


def _check(request: CompletionBody, served: ServedModel) -> None:
    """Everything that can be said before tokenizing."""
    if request.prompt is None and request.messages is not None:
        raise InvalidRequestError(
            "Missing required parameter: 'prompt'. For 'messages' there is /v1/chat/completions.",
            param="prompt",
            code="missing_required_parameter",
        )
    check_range("max_tokens", request.max_tokens, 0)
    check_range("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    check_range("best_of", request.best_of, 0, MAX_BEST_OF)
    check_sampling(request, served.info)
    refuse(request, ("suffix",), "is not supported with this model")
    requested_grammar(request, served.info)
    # The specification's minimum of 0 can only mean "not given".
    if request.best_of:
        n = request.n or 1
        if request.best_of < n:
            raise InvalidRequestError(
                f"Invalid 'best_of': expected a value >= 'n' ({n}), but got {request.best_of} "
                "instead.",
                param="best_of",
                code="invalid_value",
            )
        if request.stream and request.best_of > n:
            raise InvalidRequestError(
                "Invalid 'best_of': results cannot be streamed when 'best_of' is greater than 'n'.",
                param="best_of",
                code="invalid_value",
            )


async def _prompts(request: CompletionBody, served: ServedModel) -> list[Prompt]:
    """The prompts as tokens, in order.

    Raises:
        InvalidRequestError: mixed forms, nothing at all, or ids outside the vocabulary.
        ContextLengthError: a prompt cannot fit.
    """
    prompt = request.prompt
    limit = served.info.max_context_tokens
    if isinstance(prompt, list) and len(prompt) > max(limit, MAX_PROMPTS):
        # Too long in every form, so that the form needs no look at each item.
        if isinstance(prompt[0], int):
            check_context(limit, len(prompt), _max_tokens(request), param="prompt", noun="prompt")
        _check_count(len(prompt))
    if prompt is None:
        start = start_token(served.tokenizer, served.info)
        prompts = [Prompt([] if start is None else [start], "")]
    elif isinstance(prompt, str) or all(isinstance(item, str) for item in prompt):
        texts = [prompt] if isinstance(prompt, str) else cast(list[str], prompt)
        _check_count(len(texts))
        prompts = await prompts_of_texts(
            served.tokenizer,
            served.info,
            texts,
            add_special_tokens=request.add_special_tokens is not False,
        )
    else:
        lists = _token_lists(prompt)
        _check_count(len(lists))
        for ids in lists:
            # First what takes no look at each id: there may be millions.
            check_context(limit, len(ids), _max_tokens(request), param="prompt", noun="prompt")
            check_token_ids("prompt", ids, served.info.vocab_size)
        prompts = [Prompt(ids) for ids in lists]
    if any(not item.token_ids for item in prompts):
        raise InvalidRequestError(
            "Invalid 'prompt': a prompt without tokens cannot be continued.",
            param="prompt",
            code="invalid_value",
        )
    return prompts


def _token_lists(prompt: Prompts) -> list[list[int]]:
    if all(isinstance(item, int) for item in prompt):
        return [cast(list[int], prompt)]
    if all(isinstance(item, list) for item in prompt):
        return cast(list[list[int]], prompt)
    raise InvalidRequestError(
        "Invalid type for 'prompt': expected a string, an array of strings, an array of token "
        "ids, or an array of such arrays, but got an array of mixed types instead.",
        param="prompt",
        code="invalid_type",
    )


def _check_count(count: int) -> None:
    if count == 0:
        raise InvalidRequestError(
            "Invalid 'prompt': empty array. Expected an array with minimum length 1, but got an "
            "empty array instead.",
            param="prompt",
            code="empty_array",
        )
    if count > MAX_PROMPTS:
        raise InvalidRequestError(
            f"Invalid 'prompt': array too long. Expected an array with maximum length "
            f"{MAX_PROMPTS}, but got an array with length {count} instead.",
            param="prompt",
            code="array_above_max_length",
        )


def _max_tokens(request: CompletionBody) -> int:
    return DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens


def _generation_request(
    request: CompletionBody,
    served: ServedModel,
    prompts: list[Prompt],
    salt: str,
) -> GenerationRequest:
    max_tokens = _max_tokens(request)
    for prompt in prompts:
        check_context(
            served.info.max_context_tokens,
            len(prompt.token_ids),
            max_tokens,
            param="prompt",
            noun="prompt",
        )
    n = request.n or 1
    best_of = request.best_of or n
    if len(prompts) * best_of > MAX_CANDIDATES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with {best_of} candidates each are more than the "
            f"{MAX_CANDIDATES} that one call may have.",
            param="best_of" if request.best_of else "n",
            code="invalid_value",
        )
    grammar, grammar_param = requested_grammar(request, served.info)
    return GenerationRequest(
        prompts,
        sampling_of(
            request,
            served.info,
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            grammar=grammar,
        ),
        n=n,
        best_of=best_of,
        prompt_logprobs=request.logprobs if request.echo else None,
        skip_special_tokens=request.skip_special_tokens is not False,
        salt=salt,
        grammar_param=grammar_param or None,
    )


class _Answer:
    """The shapes of one call's answer."""

    def __init__(
        self,
        request: CompletionBody,
        served: ServedModel,
        model: str,
        generation_request: GenerationRequest,
    ) -> None:
        self._request = request
        self._tokenizer: Tokenizer = served.tokenizer
        self._asked = generation_request
        self._envelope = Envelope("cmpl", served.info, model)
        options = request.stream_options
        self.writer = ChunkWriter(
            self._envelope.chunk_head("text_completion"),
            include_usage=options is not None and bool(options.include_usage),
        )
        #: The prompts as they are echoed, if they are to be.
        self.echoes = (
            [self._echo(prompt) for prompt in generation_request.prompts] if request.echo else None
        )
        self._heads = [
            b'{"index":%d,"text":' % index
            for index in range(len(generation_request.prompts) * generation_request.n)
        ]

    def _echo(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(
            prompt.token_ids, skip_special_tokens=self._asked.skip_special_tokens
        )

    def events(self, update: Update) -> bytes:
        """One update as events; empty when there is nothing to show."""
        if isinstance(update, PromptFilled):
            return self._prompt_events(update)
        wants_ids = bool(self._request.return_token_ids)
        shown = update.text or update.tokens or (wants_ids and update.token_ids)
        if not shown and update.finish_reason is None:
            return b""
        logprobs = b"null"
        if self._request.logprobs is not None:
            start = 0 if self.echoes is None else len(self.echoes[update.prompt])
            logprobs = encode(completion_logprobs(self._tokenizer, update.tokens, start))
        return self.writer.event(
            self._choice(
                update.prompt * self._asked.n + update.choice,
                update.text,
                logprobs,
                update.finish_reason,
                b',"token_ids":' + encode(update.token_ids) if wants_ids else b"",
            )
        )

    def _prompt_events(self, update: PromptFilled) -> bytes:
        """The echo of a prompt, once for each of its choices; the end of what only was filled."""
        ends = self._asked.sampling.max_tokens == 0
        if self.echoes is None and not ends:
            return b""
        text = "" if self.echoes is None else self.echoes[update.prompt]
        logprobs = b"null"
        if self._request.logprobs is not None:
            logprobs = encode(self._prompt_logprobs(update))
        first = update.prompt * self._asked.n
        finish_reason = "length" if ends else None
        return b"".join(
            self.writer.event(self._choice(index, text, logprobs, finish_reason, b""))
            for index in range(first, first + self._asked.n)
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
        token_ids = self._asked.prompts[update.prompt].token_ids
        return echoed_logprobs(self._tokenizer, token_ids, update.logprobs)

    def whole(self, outcomes: list[Outcome]) -> dict[str, Any]:
        """The answer that is not streamed, but for its usage."""
        choices: list[dict[str, Any]] = []
        for prompt, outcome in enumerate(outcomes):
            echo = "" if self.echoes is None else self.echoes[prompt]
            for candidate in outcome.candidates:
                logprobs = None
                if self._request.logprobs is not None:
                    logprobs = completion_logprobs(self._tokenizer, candidate.tokens, len(echo))
                    if self.echoes is not None and outcome.filled is not None:
                        logprobs = joined(self._prompt_logprobs(outcome.filled), logprobs)
                choice: dict[str, Any] = {
                    "index": len(choices),
                    "text": echo + candidate.text,
                    "logprobs": logprobs,
                    "finish_reason": candidate.finish_reason,
                }
                if self._request.return_token_ids:
                    choice["token_ids"] = candidate.token_ids
                    choice["prompt_token_ids"] = self._asked.prompts[prompt].token_ids
                choices.append(choice)
        return {"object": "text_completion", **self._envelope.fields, "choices": choices}
