"""`POST /v1/chat/completions` for models of our own engines.

The model's chat template renders the whole chat, which is tokenized whole. What such a model
cannot do (audio, images) is refused by name.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, cast

import msgspec
from parrot_engine.protocol import Grammar
from parrot_engine.text import Tokenizer

from parrot_gateway.api.openai.answers import (
    ChunkWriter,
    Envelope,
    chat_logprobs,
    encode,
    usage_dict,
)
from parrot_gateway.api.openai.sse import stream_generation
from parrot_gateway.api.openai.tool_answers import ToolChoiceText
from parrot_gateway.exceptions import InvalidRequestError, UnsupportedError
from parrot_gateway.generation.collect import Outcome, collect, hand_over
from parrot_gateway.generation.generate import Generation
from parrot_gateway.generation.placement import Placer, ServedModel
from parrot_gateway.generation.prompts import prompts_of_texts
from parrot_gateway.generation.request import (
    ChoiceDelta,
    GenerationRequest,
    Prompt,
    PromptFilled,
    Update,
)
from parrot_gateway.generation.requests.grammars import check_supported, requested_grammar
from parrot_gateway.generation.requests.messages import render_chat_aside
from parrot_gateway.generation.requests.tools import requested_tools
from parrot_gateway.generation.requests.types import ChatBody
from parrot_gateway.generation.requests.validation import (
    check_choice,
    check_context,
    check_range,
    check_sampling,
    decode,
    may_be_too_long,
    nested_too_deeply,
    refuse,
    sampling_of,
)
from parrot_gateway.generation.tools.definitions import ToolUse, tool_format
from parrot_gateway.generation.tools.grammar import calls_grammar, optional_calls_grammar
from parrot_gateway.generation.tools.parsing import WRITINGS, ToolFormat
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.settings.model import ServerSettings

MAX_TOP_LOGPROBS = 20
MAX_METADATA = 16

_DECODER = msgspec.json.Decoder(ChatBody)

_REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")


async def handle_chat(
    exchange: Exchange,
    placer: Placer,
    requested_model: str,
    body: bytes,
    server: ServerSettings,
    *,
    salt: str = "",
) -> None:
    """Answer one call; arguments, errors and cancellation as in `handle_completions`."""
    request = decode(body, _DECODER)
    options = _check(request, placer)
    if exchange.reader is not None and options.tools is not None:
        raise UnsupportedError(
            "Unsupported parameter: 'tools' has no place in a call whose text fills a variable; "
            "with 'tool_choice' 'none' it passes.",
            param="tools",
        )
    exchange.cancel_on_disconnect(cast(asyncio.Task[Any], asyncio.current_task()))
    prompt = await _prompt(request, placer, len(body), options)
    generation_request = _generation_request(request, placer, prompt, salt, options)
    generation = Generation(placer, generation_request, exchange.started + server.call_timeout_s)
    if exchange.reader is not None:
        await hand_over(generation, exchange.reader, best_of=generation_request.best_of)
        return
    answer = _Answer(request, placer, requested_model, generation_request, options)
    if request.stream:
        await stream_generation(
            exchange,
            generation,
            keep_alive_s=server.keep_alive_s,
            opening=answer.opening(),
            encode=answer.events,
            closing=lambda: answer.writer.usage(generation.state.usage),
        )
        return
    with generation:
        outcome = (await collect(generation, 1, generation_request.best_of))[0]
    content = answer.whole(outcome) | {"usage": usage_dict(generation.state.usage)}
    await exchange.respond(200, encode(content))


def check_chat(body: bytes, served: ServedModel) -> None:
    """Everything that can be said of a body before its prompt is final.

    Raises:
        InvalidRequestError: a field is wrong, or this model cannot honour it.
    """
    _check(decode(body, _DECODER), served)


async def check_chat_fits(body: bytes, served: ServedModel) -> None:
    """What can be said once the messages are final; raises as `check_completions_fit`."""
    request = decode(body, _DECODER)
    if may_be_too_long(body, request, served.info):
        options = _check(request, served)
        prompt = await _prompt(request, served, len(body), options)
        _generation_request(request, served, prompt, "", options)


class OutputOptions(NamedTuple):
    """What is asked of the output."""

    grammar: Grammar | None
    #: The field that asks for it.
    grammar_param: str | None
    tools: ToolUse | None
    #: How the model writes calls.
    format: ToolFormat


def _check(request: ChatBody, served: ServedModel) -> OutputOptions:
    """Everything that can be said before rendering."""
    check_range("max_tokens", request.max_tokens, 1)
    check_range("max_completion_tokens", request.max_completion_tokens, 1)
    check_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
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
    if request.metadata is not None and len(request.metadata) > MAX_METADATA:
        raise InvalidRequestError(
            f"Invalid 'metadata': {len(request.metadata)} pairs, at most {MAX_METADATA} are "
            "allowed.",
            param="metadata",
            code="object_above_max_properties",
        )
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


async def _prompt(
    request: ChatBody, served: ServedModel, num_bytes: int, options: OutputOptions
) -> Prompt:
    tools = () if options.tools is None else options.tools.tools
    text = await render_chat_aside(served.tokenizer, request, num_bytes, tools)
    prompts = await prompts_of_texts(
        served.tokenizer,
        served.info,
        [text],
        add_special_tokens=bool(request.add_special_tokens),
        param="messages",
        noun="messages",
    )
    if not prompts[0].token_ids:
        raise InvalidRequestError(
            "Invalid 'messages': they make an empty prompt.", param="messages", code="invalid_value"
        )
    return prompts[0]


def _generation_request(
    request: ChatBody, served: ServedModel, prompt: Prompt, salt: str, options: OutputOptions
) -> GenerationRequest:
    limit = served.info.max_context_tokens
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    length = len(prompt.token_ids)
    check_context(limit, length, max_tokens, param="messages", noun="messages")
    if max_tokens is None:
        max_tokens = limit - length
    n = request.n or 1
    return GenerationRequest(
        [prompt],
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
    )


def _has_special_marker(options: OutputOptions, tokenizer: Tokenizer) -> bool:
    """Whether calls are announced by a token that texts are usually shown without."""
    if options.tools is None:
        return False
    token_id = tokenizer.token_id(WRITINGS[options.format].opening)
    return token_id is not None and tokenizer.is_special(token_id)


class _Answer:
    """The shapes of one call's answer."""

    def __init__(
        self,
        request: ChatBody,
        served: ServedModel,
        model: str,
        generation_request: GenerationRequest,
        options: OutputOptions,
    ) -> None:
        self._request = request
        self._output_options = options
        #: By choice, where tools may be called.
        self._texts = [
            self._tool_text() for _ in range(generation_request.n if options.tools else 0)
        ]
        self._tokenizer = served.tokenizer
        self._asked = generation_request
        self._envelope = Envelope("chatcmpl", served.info, model)
        # The tier that served the call, reported to callers that asked for one.
        self._extra = {} if request.service_tier is None else {"service_tier": "default"}
        stream_options = request.stream_options
        self.writer = ChunkWriter(
            self._envelope.chunk_head("chat.completion.chunk", self._extra),
            include_usage=stream_options is not None and bool(stream_options.include_usage),
        )
        self._heads = [b'{"index":%d,"delta":' % index for index in range(generation_request.n)]

    def _tool_text(self) -> ToolChoiceText:
        assert self._output_options.tools is not None
        names = {tool.name for tool in self._output_options.tools.callable}
        calls_only = self._output_options.tools.mode == "required"
        return ToolChoiceText(self._output_options.format, names, calls_only=calls_only)

    def opening(self) -> bytes:
        """The role of every choice, in order: clients count on that order."""
        calls_only = (
            self._output_options.tools is not None and self._output_options.tools.mode == "required"
        )
        content = b"null" if calls_only else b'""'
        return b"".join(
            self.writer.event(
                head + b'{"role":"assistant","content":' + content + b',"refusal":null},'
                b'"logprobs":null,"finish_reason":null}'
            )
            for head in self._heads
        )

    def events(self, update: Update) -> bytes:
        """One update as events: its text, then the reason why it was the last."""
        if isinstance(update, PromptFilled):
            return b""
        if self._texts:
            return self._tool_events(update)
        head, events = self._heads[update.choice], b""
        wants_ids = self._request.return_token_ids and update.token_ids
        shown = update.text or any(not token.is_end for token in update.tokens)
        if shown or wants_ids:
            logprobs = b"null"
            if self._request.logprobs:
                logprobs = encode(chat_logprobs(self._tokenizer, update.tokens))
            events = self.writer.event(
                b'%s{"content":%s},"logprobs":%s,"finish_reason":null%s}'
                % (
                    head,
                    encode(update.text),
                    logprobs,
                    b',"token_ids":' + encode(update.token_ids) if wants_ids else b"",
                )
            )
        if update.finish_reason is not None:
            events += self.writer.event(
                b'%s{},"logprobs":null,"finish_reason":"%s"}'
                % (head, update.finish_reason.encode())
            )
        return events

    def _tool_events(self, update: ChoiceDelta) -> bytes:
        """The same where tools may be called: content and pieces of calls, one event each."""
        head, text = self._heads[update.choice], self._texts[update.choice]
        deltas = text.deltas(update.text, update.finish_reason)
        extra = b'"logprobs":null,"finish_reason":null'
        shown = any(not token.is_end for token in update.tokens)
        if self._request.return_token_ids and update.token_ids:
            extra += b',"token_ids":' + encode(update.token_ids)
        elif not shown and not deltas:
            deltas, extra = [], b""
        if self._request.logprobs and shown:
            logprobs = encode(chat_logprobs(self._tokenizer, update.tokens))
            extra = extra.replace(b'"logprobs":null', b'"logprobs":' + logprobs, 1)
        if extra and not deltas:
            # Held back as text, but told as tokens.
            deltas = [b"{}"]
        events = b""
        for delta in deltas:
            events += self.writer.event(b"%s%s,%s}" % (head, delta, extra))
            extra = b'"logprobs":null,"finish_reason":null'
        if update.finish_reason is not None:
            reason = text.finish_reason(update.finish_reason).encode()
            events += self.writer.event(
                b'%s{},"logprobs":null,"finish_reason":"%s"}' % (head, reason)
            )
        return events

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """The answer that is not streamed, but for its usage."""
        choices: list[dict[str, Any]] = []
        for index, candidate in enumerate(outcome.candidates):
            choice: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "content": candidate.text, "refusal": None},
                "logprobs": chat_logprobs(self._tokenizer, candidate.tokens)
                if self._request.logprobs
                else None,
                "finish_reason": candidate.finish_reason,
            }
            if self._texts:
                text = self._texts[index]
                choice["message"] = text.message(candidate.text)
                choice["finish_reason"] = text.finish_reason(candidate.finish_reason)
            if self._request.return_token_ids:
                choice["token_ids"] = candidate.token_ids
            choices.append(choice)
        answer = {"object": "chat.completion", **self._envelope.fields, **self._extra}
        answer["choices"] = choices
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = self._asked.prompts[0].token_ids
        return answer
