"""Completion requests for models of own engines: checks, prompts, the request for the engine.

All four forms of a prompt, batched in order: choice `prompt * n + j` is the j-th of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from parrot_engine.protocol import Grammar

from parrot_gateway.calls.generation_request import GenerationRequest, TokenizedPrompt
from parrot_gateway.calls.metadata import ServedModel
from parrot_gateway.calls.requests.field_checks import check_token_ids, refuse
from parrot_gateway.calls.requests.grammars import ignored_formats, requested_grammar
from parrot_gateway.calls.requests.prepared import (
    PreparedCall,
    check_context,
    check_sampling,
    prompts_of_texts,
    sampling_of,
    start_tokens,
    texts_of,
    token_lists_of,
)
from parrot_gateway.calls.requests.types import CompletionBody
from parrot_gateway.exceptions import InvalidRequestError, empty_array, invalid_value, long_array

#: OpenAI's default.
DEFAULT_MAX_TOKENS = 16
#: Prompts of one call, and candidates of all of them together.
MAX_PROMPTS = 2048
MAX_CANDIDATES = 4096


@dataclass(eq=False)
class CompletionCall(PreparedCall[CompletionBody]):
    """A completion whose fields were checked; see `PreparedCall`.

    Raises:
        InvalidRequestError: a field is wrong, or this model cannot honour it.
    """

    _grammar: Grammar | None = field(init=False)
    _grammar_param: str = field(init=False)
    _prompts: list[TokenizedPrompt] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._grammar, self._grammar_param = _check(self.request, self.served)

    @property
    def ignored(self) -> Sequence[str]:
        request = self.request
        if self._grammar is None or self._grammar.kind != "json_schema":
            return ()
        return ignored_formats(
            [request.response_format, request.structured_outputs, request.guided_json,
             request.json_schema]
        )  # fmt: skip

    def forget_prompt(self) -> None:
        self._prompts = None

    async def generation_request(self, salt: str) -> GenerationRequest:
        request, served = self.request, self.served
        if self._prompts is None:
            self._prompts = await _prompts(request, served)
        prompts, max_tokens = self._prompts, _max_tokens(request)
        for prompt in prompts:
            _check_fits(len(prompt.token_ids), request, served)
        n = request.n or 1
        best_of = request.best_of or n
        if len(prompts) * best_of > MAX_CANDIDATES:
            raise InvalidRequestError(
                f"{len(prompts)} prompts with {best_of} candidates each are more than the "
                f"{MAX_CANDIDATES} that one call may have.",
                param="best_of" if request.best_of else "n",
                code="invalid_value",
            )
        shows_special = request.skip_special_tokens is False
        return GenerationRequest(
            prompts,
            sampling_of(
                request,
                served.info,
                max_tokens=max_tokens,
                logprobs=request.logprobs,
                grammar=self._grammar,
            ),
            n=n,
            best_of=best_of,
            prompt_logprobs=request.logprobs if request.echo else None,
            skip_special_tokens=not shows_special,
            salt=salt,
            grammar_param=self._grammar_param or None,
            echoes=[self._echo(prompt) for prompt in prompts] if request.echo else None,
        )

    def _echo(self, prompt: TokenizedPrompt) -> str:
        if prompt.text is not None:
            return prompt.text
        # All of them are the caller's own, special ones too.
        return self.served.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def _check(request: CompletionBody, served: ServedModel) -> tuple[Grammar | None, str]:
    """Check the fields; returns the grammar, and the field that sets it."""
    if request.prompt is None and request.messages is not None:
        raise InvalidRequestError(
            "Missing required parameter: 'prompt'. For 'messages' there is /v1/chat/completions.",
            param="prompt",
            code="missing_required_parameter",
        )
    check_sampling(request, served.info)
    refuse(request, ("suffix",), "is not supported with this model")
    grammar = requested_grammar(request, served.info)
    # The specification's minimum of 0 can only mean "not given".
    if request.best_of:
        n = request.n or 1
        if request.best_of < n:
            raise invalid_value(
                "best_of", f"expected a value >= 'n' ({n}), but got {request.best_of} instead."
            )
        if request.stream and request.best_of > n:
            raise invalid_value(
                "best_of", "results cannot be streamed when 'best_of' is greater than 'n'."
            )
    return grammar


async def _prompts(request: CompletionBody, served: ServedModel) -> list[TokenizedPrompt]:
    """The prompts as tokens, in order.

    Raises:
        InvalidRequestError: mixed forms, nothing at all, or ids outside the vocabulary.
        ContextLengthError: a prompt cannot fit.
    """
    prompt = request.prompt
    most = max(served.info.max_context_tokens, MAX_PROMPTS)
    if isinstance(prompt, list) and len(prompt) > most:
        # Too long in every form, so that the form needs no look at each item.
        if isinstance(prompt[0], int):
            _check_fits(len(prompt), request, served)
        _check_count(len(prompt))
    if prompt is None:
        prompts = [TokenizedPrompt(start_tokens(served.tokenizer, served.info), "")]
    elif (texts := texts_of(prompt)) is not None:
        _check_count(len(texts))
        prompts = await prompts_of_texts(
            served.tokenizer,
            served.info,
            texts,
            add_special_tokens=request.add_special_tokens is not False,
        )
    else:
        lists = token_lists_of(prompt, "prompt")
        _check_count(len(lists))
        for ids in lists:
            # First what takes no look at each id: there may be millions.
            _check_fits(len(ids), request, served)
            check_token_ids("prompt", ids, served.info.vocab_size)
        prompts = [TokenizedPrompt(ids) for ids in lists]
    if any(not item.token_ids for item in prompts):
        raise invalid_value("prompt", "a prompt without tokens cannot be continued.")
    return prompts


def _check_fits(num_tokens: int, request: CompletionBody, served: ServedModel) -> None:
    check_context(
        served.info.max_context_tokens,
        num_tokens,
        _max_tokens(request),
        param="prompt",
        noun="prompt",
        completion_param="max_tokens",
    )


def _check_count(count: int) -> None:
    if count == 0:
        raise empty_array("prompt")
    if count > MAX_PROMPTS:
        raise long_array("prompt", MAX_PROMPTS, count)


def _max_tokens(request: CompletionBody) -> int:
    return DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
