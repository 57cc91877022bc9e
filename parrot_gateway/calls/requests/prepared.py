"""The steps that chats and completions for models of own engines share.

A request that was checked against a model, its prompts as tokens, its sampling parameters. Every
text is tokenized whole. Long ones go to a thread: the tokenizer releases the GIL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Generic, Self, TypeVar, cast

from parrot_engine.protocol import EngineInfo, Grammar, SamplingParams
from parrot_engine.text import Tokenizer

from parrot_gateway.calls.generation_request import GenerationRequest, TokenizedPrompt
from parrot_gateway.calls.metadata import ServedModel
from parrot_gateway.calls.requests.field_checks import (
    check_token_ids,
    logit_bias_of,
    refuse,
    shown_number,
)
from parrot_gateway.calls.requests.types import ChatBody, CompletionBody, Prompts, SamplingFields
from parrot_gateway.exceptions import (
    ContextLengthError,
    InvalidRequestError,
    UnsupportedError,
    invalid_value,
    wrong_type,
)

#: Characters that are tokenized in place: about a millisecond.
INLINE_CHARACTERS = 8192
MIN_TOP_P = 1e-9
#: OpenAI's, and of fields that it does not have those that change nothing.
DEFAULT_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
#: Other servers' extensions that change the output and are not offered here.
_EXTENSIONS = (
    "include_stop_str_in_output",
    "prompt_embeds",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "use_beam_search",
)
_extensions, _no_extensions = attrgetter(*_EXTENSIONS), (None,) * len(_EXTENSIONS)

_BodyT = TypeVar("_BodyT", bound=ChatBody | CompletionBody)


@dataclass(eq=False)
class PreparedCall(Generic[_BodyT]):
    """A request whose fields were checked against a model; base of one class for each kind.

    Args:
        request: typed.
        served: the model.
        size: bytes of the request's body, as a measure.
    """

    request: _BodyT
    served: ServedModel
    size: int

    @property
    def uses_tools(self) -> bool:
        """Return whether the model may call tools."""
        return False

    @property
    def ignored(self) -> Sequence[str]:
        """Parts of its schemas that mean nothing here, as `x-parrot-ignored` names them."""
        return ()

    def rebound(self, request: _BodyT, served: ServedModel, size: int) -> Self | None:
        """The same call with other texts in its prompt; None where it was checked for another
        model, and has to be prepared anew."""
        if served.info != self.served.info:
            return None
        if request is self.request:
            return self
        again = copy(self)
        again.request, again.size = request, size
        again.forget_prompt()
        return again

    def forget_prompt(self) -> None:
        """The prompt is to be read anew."""
        raise NotImplementedError

    async def generation_request(self, salt: str) -> GenerationRequest:
        """The request for an engine, the prompt tokenized whole.

        Args:
            salt: prefixes are shared only under the same one.

        Raises:
            ContextLengthError: it does not fit the model's context.
            InvalidRequestError: it cannot be a prompt.
        """
        raise NotImplementedError

    async def check_fits(self) -> None:
        """Check the length of a prompt that is final; raises as `generation_request`."""
        limit = self.served.info.max_context_tokens
        # No token is shorter than a byte, so most requests can be seen to fit.
        requested = max(
            self.request.max_tokens or 0, getattr(self.request, "max_completion_tokens", None) or 0
        )
        if self.size + requested > limit:
            await self.generation_request("")


# -- prompts ------------------------------------------------------------------------------------


def texts_of(prompts: Prompts) -> list[str] | None:
    """Prompts that are texts; None where some are not."""
    if isinstance(prompts, str):
        return [prompts]
    return cast("list[str]", prompts) if all(isinstance(item, str) for item in prompts) else None


def token_lists_of(prompts: Prompts, param: str) -> list[list[int]]:
    """Prompts that are lists of token ids, or one such list.

    Raises:
        InvalidRequestError: some of them are something else; `param` names the field.
    """
    if all(isinstance(item, int) for item in prompts):
        return [cast("list[int]", prompts)]
    if all(isinstance(item, list) for item in prompts):
        return cast("list[list[int]]", prompts)
    raise wrong_type(
        param,
        "a string, an array of strings, an array of token ids, or an array of such arrays, but got "
        "an array of mixed types instead",
    )


async def tokenize(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of each text, in order.

    A cancelled wait leaves the thread to finish its text; nothing reads the result.
    """
    encode = partial(tokenizer.encode, add_special_tokens=add_special_tokens)
    if sum(map(len, texts)) <= INLINE_CHARACTERS:
        return list(map(encode, texts))
    return await asyncio.to_thread(lambda: list(map(encode, texts)))


def start_tokens(tokenizer: Tokenizer, info: EngineInfo) -> list[int]:
    """Return the token of an empty prompt: beginning-of-text, else end-of-text, if there is any."""
    bos = tokenizer.bos_token_id
    return info.eos_token_ids[:1] if bos is None else [bos]


async def refuse_hopeless(
    tokenizer: Tokenizer, info: EngineInfo, texts: Sequence[str], *, param: str, noun: str
) -> None:
    """Refuse texts that can never fit the model's context, before they are tokenized.

    Args:
        tokenizer: the model's.
        info: of the engine.
        texts: the prompts.
        param: the field that holds them.
        noun: what they are called: `messages` or `prompt`.

    Raises:
        ContextLengthError: one of them has too many tokens, however they turn out.
    """
    # Others are cheap to tokenize, or have hardly more characters than the context has tokens.
    suspects = [
        text for text in texts if len(text) > max(info.max_context_tokens, INLINE_CHARACTERS)
    ]
    if not suspects:
        return
    least = await asyncio.to_thread(lambda: max(map(tokenizer.least_tokens, suspects)))
    if least > info.max_context_tokens:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_context_tokens} tokens. However, "
            f"your {noun} resulted in at least {least} tokens. Please reduce the length of the "
            f"{noun}.",
            param=param,
        )


async def prompts_of_texts(
    tokenizer: Tokenizer,
    info: EngineInfo,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    param: str = "prompt",
    noun: str = "prompt",
) -> list[TokenizedPrompt]:
    """Texts as prompts; one without tokens becomes `start_tokens`.

    Raises:
        ContextLengthError: see `refuse_hopeless`, which explains `param` and `noun`.
    """
    if sum(map(len, texts)) > INLINE_CHARACTERS:
        await refuse_hopeless(tokenizer, info, texts, param=param, noun=noun)
    tokenized = await tokenize(tokenizer, texts, add_special_tokens=add_special_tokens)
    return [
        TokenizedPrompt(ids or start_tokens(tokenizer, info), text)
        for ids, text in zip(tokenized, texts, strict=True)
    ]


# -- sampling -----------------------------------------------------------------------------------


def _cannot_generate(info: EngineInfo) -> UnsupportedError:
    scores = info.pooling is not None and info.pooling.task == "score"
    return UnsupportedError(
        f"The model '{info.model}' ({info.architecture}) generates no text; it is there for "
        + ("/v1/rerank and /v1/score." if scores else "/v1/embeddings."),
        param="model",
        code="unsupported_route",
    )


def check_sampling(body: SamplingFields, info: EngineInfo) -> None:
    """Check all that completions and chat have in common.

    Raises:
        InvalidRequestError: naming the first field at fault.
    """
    if not info.generates:
        raise _cannot_generate(info)
    if _extensions(body) != _no_extensions:
        refuse(body, _EXTENSIONS, "is not supported with this model")
    if body.stop_token_ids:
        check_token_ids("stop_token_ids", body.stop_token_ids, info.vocab_size)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )


def sampling_of(
    body: SamplingFields,
    info: EngineInfo,
    *,
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """The engine's parameters for a checked body.

    What the caller leaves open is taken from the checkpoint's generation config, as its makers
    recommend, and else from OpenAI's defaults.

    Raises:
        InvalidRequestError: `logit_bias`, or `min_tokens` above `max_tokens`.
    """
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise invalid_value(
            "min_tokens",
            f"{body.min_tokens} is more than the {max_tokens} tokens that may be generated.",
        )
    default = DEFAULT_SAMPLING | info.default_sampling
    top_p = default["top_p"] if body.top_p is None else body.top_p
    top_k = int(default["top_k"]) if body.top_k is None else body.top_k
    penalty = body.repetition_penalty
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or ()
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=default["temperature"] if body.temperature is None else body.temperature,
        # OpenAI's 0 leaves the likeliest token, as any small enough nucleus does.
        top_p=max(top_p, MIN_TOP_P),
        # vLLM's -1 is our 0: off.
        top_k=max(0, top_k),
        min_p=default["min_p"] if body.min_p is None else body.min_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=default["repetition_penalty"] if penalty is None else penalty,
        logit_bias=logit_bias_of(body.logit_bias, info.vocab_size) if body.logit_bias else None,
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs,
        grammar=grammar,
        stop=tuple(filter(None, stop)),
    )


def default_max_tokens(info: EngineInfo, room: int) -> int:
    """Tokens of an answer whose caller sets no limit: what the checkpoint's makers recommend, as
    far as there is `room`, else all of that."""
    recommended = info.default_sampling.get("max_new_tokens")
    return room if recommended is None else max(1, min(room, int(recommended)))


def check_context(
    limit: int,
    prompt: int,
    completion: int | None,
    *,
    param: str,
    noun: str,
    completion_param: str | None = None,
) -> None:
    """Refuse what does not fit the model's context.

    Args:
        limit: the model's, in tokens.
        prompt: tokens of the prompt.
        completion: tokens that may be generated; None for as many as fit, but one at least.
        param: the field that holds the prompt.
        noun: what the prompt is called: `messages` or `prompt`.
        completion_param: the field that sets `completion`; at fault where the prompt alone fits.

    Raises:
        ContextLengthError: it does not fit.
    """
    if completion is None:
        if prompt + 1 > limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, your {noun} "
                f"resulted in {prompt} tokens. Please reduce the length of the {noun}.",
                param=param,
            )
        return
    if prompt + completion > limit:
        field = f" ('{completion_param}')" if completion_param else ""
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{shown_number(prompt + completion)} tokens ({prompt} in the {noun}, "
            f"{shown_number(completion)} in the completion). Please reduce the length of the "
            f"{noun} or completion{field}.",
            param=param if prompt >= limit else completion_param or param,
        )
