"""Chat requests for models of own engines: checks, prompt, and what is asked of the engine.

The model's chat template renders the whole chat, which is tokenized whole. What such a model
cannot do (audio, images) is refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from parrot_engine.protocol import Grammar
from parrot_engine.text import Tokenizer

from parrot_gateway.exceptions import InvalidRequestError, UnsupportedError
from parrot_gateway.generation.placement import ServedModel
from parrot_gateway.generation.prompts import prompts_of_texts
from parrot_gateway.generation.request import GenerationRequest, TokenizedPrompt
from parrot_gateway.generation.requests.grammars import check_supported, requested_grammar
from parrot_gateway.generation.requests.messages import render_chat_aside
from parrot_gateway.generation.requests.prepared import PreparedCall
from parrot_gateway.generation.requests.tools import requested_tools
from parrot_gateway.generation.requests.types import ChatBody
from parrot_gateway.generation.requests.validation import (
    check_choice,
    check_context,
    check_sampling,
    nested_too_deeply,
    refuse,
    sampling_of,
)
from parrot_gateway.generation.tools.definitions import ToolUse, tool_format
from parrot_gateway.generation.tools.grammar import calls_grammar, optional_calls_grammar
from parrot_gateway.generation.tools.parsing import WRITINGS, ToolFormat, ToolParsing

_REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")


class OutputOptions(NamedTuple):
    """What is asked of the output."""

    grammar: Grammar | None
    #: The field that asks for it.
    grammar_param: str | None
    tools: ToolUse | None
    #: How the model writes calls.
    format: ToolFormat


class ChatCall(PreparedCall[ChatBody]):
    """A chat whose fields were checked; see `PreparedCall`.

    Raises:
        InvalidRequestError: a field is wrong, or this model cannot honour it.
    """

    def __init__(self, request: ChatBody, served: ServedModel, size: int) -> None:
        super().__init__(request, served, size)
        self._options = _check(request, served)
        self._prompt: TokenizedPrompt | None = None

    @property
    def uses_tools(self) -> bool:
        return self._options.tools is not None

    def forget_prompt(self) -> None:
        self._prompt = None

    async def generation_request(self, salt: str) -> GenerationRequest:
        request, served, options = self.request, self.served, self._options
        if self._prompt is None:
            self._prompt = await self._read_prompt()
        limit, length = served.info.max_context_tokens, len(self._prompt.token_ids)
        max_tokens = request.max_completion_tokens
        if max_tokens is None:
            max_tokens = request.max_tokens
        check_context(limit, length, max_tokens, param="messages", noun="messages")
        if max_tokens is None:
            max_tokens = limit - length
        n, tools = request.n or 1, options.tools
        parsing = None
        if tools is not None:
            names = frozenset(tool.name for tool in tools.callable)
            parsing = ToolParsing(options.format, names, calls_only=tools.mode == "required")
        return GenerationRequest(
            [self._prompt],
            sampling_of(
                request,
                served.info,
                max_tokens=max_tokens,
                logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                grammar=options.grammar,
            ),
            n=n,
            best_of=n,
            skip_special_tokens=request.skip_special_tokens is not False
            and not _has_special_marker(options, served.tokenizer),
            salt=salt,
            grammar_param=options.grammar_param,
            tools=parsing,
        )

    async def _read_prompt(self) -> TokenizedPrompt:
        served, tools = self.served, self._options.tools
        text = await render_chat_aside(
            served.tokenizer, self.request, self.size, () if tools is None else tools.tools
        )
        prompts = await prompts_of_texts(
            served.tokenizer,
            served.info,
            [text],
            add_special_tokens=bool(self.request.add_special_tokens),
            param="messages",
            noun="messages",
        )
        if not prompts[0].token_ids:
            raise InvalidRequestError(
                "Invalid 'messages': they make an empty prompt.",
                param="messages",
                code="invalid_value",
            )
        return prompts[0]


def _check(request: ChatBody, served: ServedModel) -> OutputOptions:
    """Everything that can be said before rendering."""
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError(
            "Invalid value for 'top_logprobs': 'logprobs' must be true if this parameter is used.",
            param="top_logprobs",
            code="invalid_value",
        )
    check_sampling(request, served.info)
    _check_modalities(request.modalities)
    check_choice("reasoning_effort", request.reasoning_effort, _REASONING_EFFORTS)
    check_choice("service_tier", request.service_tier, _SERVICE_TIERS)
    _check_verbosity(request.verbosity)
    refuse(
        request,
        ("audio", "prediction", "web_search_options", "moderation", "store", "documents",
         "chat_template", "echo"),
        "is not supported with this model",
    )  # fmt: skip
    try:
        return _output_options(request, served)
    except RecursionError:
        # A schema that could be decoded, and not be written into a grammar.
        raise nested_too_deeply("tools") from None


def _output_options(request: ChatBody, served: ServedModel) -> OutputOptions:
    grammar, param = requested_grammar(request, served.info)
    tools, tokenizer = requested_tools(request), served.tokenizer
    if tools is None:
        return OutputOptions(grammar, param or None, None, "hermes")
    format = tool_format(tokenizer)
    callable_ = tools.callable
    if tools.mode == "required":
        check_supported(served.info, "tool_choice")
        grammar = calls_grammar(callable_, format, tokenizer, parallel=tools.parallel)
    elif grammar is not None:
        if grammar.kind not in ("json_schema", "json_object"):
            raise UnsupportedError(
                f"Unsupported value: '{param}' goes with 'tools' only for JSON.", param=param
            )
        grammar = calls_grammar(
            callable_, format, tokenizer, parallel=tools.parallel, content=grammar
        )
    elif any(tool.strict for tool in callable_) and served.info.supports_grammars:
        # NOTE: where the engine follows no grammar, `strict` is a wish, as it is for an upstream.
        grammar = optional_calls_grammar(callable_, format, tokenizer)
    return OutputOptions(grammar, "tools", tools, format)


def _check_modalities(modalities: Any) -> None:
    if modalities is None or modalities == ["text"]:
        return
    if not isinstance(modalities, list):
        raise InvalidRequestError(
            "Invalid type for 'modalities': expected an array of strings.",
            param="modalities",
            code="invalid_type",
        )
    raise UnsupportedError(
        "Unsupported value: 'modalities' other than ['text'] are not supported with this model.",
        param="modalities",
        code="unsupported_value",
    )


def _check_verbosity(verbosity: Any) -> None:
    if verbosity in (None, "medium"):
        return
    if not isinstance(verbosity, str):
        raise InvalidRequestError(
            "Invalid type for 'verbosity': expected a string.",
            param="verbosity",
            code="invalid_type",
        )
    check_choice("verbosity", verbosity, ("low", "medium", "high"))
    raise UnsupportedError(
        f"Unsupported value: 'verbosity' does not support '{verbosity}' with this model; only "
        "'medium' is.",
        param="verbosity",
        code="unsupported_value",
    )


def _has_special_marker(options: OutputOptions, tokenizer: Tokenizer) -> bool:
    """Whether calls are announced by a token that texts are usually shown without."""
    if options.tools is None:
        return False
    token_id = tokenizer.token_id(WRITINGS[options.format].opening)
    return token_id is not None and tokenizer.is_special(token_id)
