"""Chat requests for models of own engines: checks, prompt, and the request for the engine.

The model's chat template renders the whole chat, which is tokenized whole. What such a model
cannot do (audio, images) is refused by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec
from parrot_engine.protocol import EngineInfo
from parrot_engine.text import ChatTemplateError, Tokenizer

from parrot_gateway.calls.generation_request import GenerationRequest, TokenizedPrompt
from parrot_gateway.calls.metadata import ServedModel
from parrot_gateway.calls.reasoning import (
    reasoning_and_grammar,
    uses_special_tokens,
    without_reasoning,
)
from parrot_gateway.calls.requests.field_checks import check_choice, nested_too_deeply, refuse
from parrot_gateway.calls.requests.grammars import ignored_formats, requested_grammar
from parrot_gateway.calls.requests.output import OutputOptions, output_options
from parrot_gateway.calls.requests.prepared import (
    PreparedCall,
    check_context,
    check_sampling,
    default_max_tokens,
    prompts_of_texts,
    sampling_of,
    tokenize,
)
from parrot_gateway.calls.requests.tools import requested_tools
from parrot_gateway.calls.requests.types import (
    REASONING_SWITCHES,
    ChatBody,
    Message,
    SamplingFields,
    TokenizeBody,
)
from parrot_gateway.calls.tools.definitions import (
    Tool,
    described_in_text,
    knows_tools,
    template_source,
)
from parrot_gateway.exceptions import (
    InvalidRequestError,
    UnsupportedError,
    empty_array,
    invalid_value,
    long_array,
    missing_parameter,
    unsupported_value,
    wrong_type,
)

#: Bodies that are rendered in place: about a millisecond.
INLINE_BYTES = 32 * 1024
#: Messages of one chat. Templates take some 0.1 ms for each, and nothing ends them.
MAX_MESSAGES = 16_384

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
#: Templates know neither of these: `developer` is OpenAI's newer word for `system`, `function`
#: its older one for `tool`.
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_PARTS = ("image_url", "input_image", "input_audio", "audio", "video_url", "file",
                "input_file")  # fmt: skip
#: Variables that the gateway itself gives to a template.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "template", "chat_template", "add_generation_prompt",
     "continue_final_message", "self"}
)  # fmt: skip

_REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")
_REFUSED = ("audio", "prediction", "web_search_options", "moderation", "store", "documents",
            "chat_template", "echo")  # fmt: skip
_RARE = ("top_logprobs", "modalities", "reasoning_effort", "service_tier", "verbosity", *_REFUSED)
_OUTPUT = ("response_format", "structured_outputs", "guided_choice", "guided_grammar",
           "guided_json", "guided_regex", "regex", "ebnf", "json_schema", "tools", "tool_choice",
           "functions", "function_call")  # fmt: skip
#: Fields that most calls leave out, looked at all at once.
_rare_fields, _no_rare_fields = attrgetter(*_RARE), (None,) * len(_RARE)
_output_fields, _no_output_fields = attrgetter(*_OUTPUT), (None,) * len(_OUTPUT)


_PLAIN_OUTPUT = OutputOptions()


@dataclass(eq=False)
class ChatCall(PreparedCall[ChatBody]):
    """A chat whose fields were checked; see `PreparedCall`.

    Raises:
        InvalidRequestError: a field is wrong, or this model cannot honour it.
    """

    _options: OutputOptions = field(init=False, default=_PLAIN_OUTPUT)
    _prompt: TokenizedPrompt | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        request, served = self.request, self.served
        check_sampling(request, served.info)
        if _rare_fields(request) != _no_rare_fields:
            _check_rare(request)
        if _output_fields(request) != _no_output_fields:
            try:
                self._options = _output_options(request, served)
            except RecursionError:
                # A schema that could be decoded, and not be written into a grammar.
                raise nested_too_deeply("tools") from None

    @property
    def uses_tools(self) -> bool:
        return self._options.tools is not None

    @property
    def ignored(self) -> Sequence[str]:
        fields = _output_fields(self.request)
        return () if fields == _no_output_fields else ignored_formats(fields)

    def forget_prompt(self) -> None:
        self._prompt = None

    async def count_tokens(self) -> int:
        """The length of the prompt in tokens, also of one that does not fit the model's context.

        Raises:
            InvalidRequestError: it cannot be a prompt.
        """
        request, tokenizer = self.request, self.served.tokenizer
        text = await render_chat(tokenizer, request, self.size, self._options.shown_tools)
        special = bool(request.add_special_tokens)
        return len((await tokenize(tokenizer, [text], add_special_tokens=special))[0])

    async def generation_request(self, salt: str) -> GenerationRequest:
        request, served, options = self.request, self.served, self._options
        if self._prompt is None:
            self._prompt = await chat_prompt(
                request,
                served.tokenizer,
                served.info,
                self.size,
                tools=options.shown_tools,
                add_special_tokens=bool(request.add_special_tokens),
            )
        is_older = request.max_completion_tokens is None
        return chat_generation(
            request,
            served,
            self._prompt,
            options,
            max_tokens=request.max_tokens if is_older else request.max_completion_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            salt=salt,
            noun="messages",
            completion_param="max_tokens" if is_older else "max_completion_tokens",
            n=request.n or 1,
            reads_reasoning=request.separate_reasoning is not False,
        )


def chat_generation(
    body: SamplingFields,
    served: ServedModel,
    prompt: TokenizedPrompt,
    options: OutputOptions,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    salt: str,
    noun: str,
    completion_param: str,
    n: int = 1,
    reads_reasoning: bool = True,
) -> GenerationRequest:
    """The request for an engine of a checked chat, or of a response, whose prompt is a chat too.

    Args:
        max_tokens: None for as many as the model's makers recommend, or as there is room for.
        noun: the field that holds the messages.
        completion_param: the field that sets `max_tokens`.
        reads_reasoning: reasoning is to be parted from the content, if the model writes any.

    Raises:
        ContextLengthError: it does not fit the model's context.
        InvalidRequestError: as `sampling_of`.
    """
    info, length = served.info, len(prompt.token_ids)
    check_context(
        info.max_context_tokens,
        length,
        max_tokens,
        param=noun,
        noun=noun,
        completion_param=completion_param,
    )
    if max_tokens is None:
        max_tokens = default_max_tokens(info, info.max_context_tokens - length)
    start, grammar = None, options.grammar
    if reads_reasoning and served.parses_reasoning:
        start, grammar = reasoning_and_grammar(prompt.text, grammar, served.tokenizer)
    return GenerationRequest(
        [prompt],
        sampling_of(body, info, max_tokens=max_tokens, logprobs=logprobs, grammar=grammar),
        n=n,
        best_of=n,
        skip_special_tokens=body.skip_special_tokens is not False
        and not options.needs_special_tokens
        and not (start is not None and uses_special_tokens(served.tokenizer)),
        salt=salt,
        grammar_param=options.grammar_param,
        tools=options.parsing,
        reasoning=start,
    )


# -- checks -----------------------------------------------------------------------------------


def _check_rare(request: ChatBody) -> None:
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError(
            "Invalid value for 'top_logprobs': 'logprobs' must be true if this parameter is used.",
            param="top_logprobs",
            code="invalid_value",
        )
    modalities, verbosity = request.modalities, request.verbosity
    if modalities is not None and modalities != ["text"]:
        if not isinstance(modalities, list):
            raise wrong_type("modalities", "an array of strings")
        raise unsupported_value(
            "modalities", "'modalities' other than ['text'] are not supported with this model."
        )
    check_choice("reasoning_effort", request.reasoning_effort, _REASONING_EFFORTS)
    check_choice("service_tier", request.service_tier, _SERVICE_TIERS)
    if verbosity not in (None, "medium"):
        if not isinstance(verbosity, str):
            raise wrong_type("verbosity", "a string")
        check_choice("verbosity", verbosity, ("low", "medium", "high"))
        raise unsupported_value(
            "verbosity",
            f"'verbosity' does not support '{verbosity}' with this model; only 'medium' is.",
        )
    refuse(request, ("store",), "is not supported with this model here; /v1/responses stores")
    refuse(request, _REFUSED, "is not supported with this model")


def _output_options(request: ChatBody, served: ServedModel) -> OutputOptions:
    grammar, param = requested_grammar(request, served.info)
    return output_options(grammar, param or None, requested_tools(request), served)


# -- prompt -----------------------------------------------------------------------------------


async def chat_prompt(
    body: ChatBody,
    tokenizer: Tokenizer,
    info: EngineInfo,
    num_bytes: int,
    *,
    tools: Sequence[Tool] = (),
    add_special_tokens: bool = False,
    noun: str = "messages",
) -> TokenizedPrompt:
    """The prompt of a chat, rendered and tokenized whole.

    Args:
        num_bytes: of the request, as a measure of the work.
        tools: shown to the model.
        noun: the field of the request that holds the messages.

    Raises:
        ContextLengthError: it cannot fit the model's context.
        InvalidRequestError: as `render_chat`, or it is empty.
    """
    text = await render_chat(tokenizer, body, num_bytes, tools)
    prompts = await prompts_of_texts(
        tokenizer, info, [text], add_special_tokens=add_special_tokens, param=noun, noun=noun
    )
    if not prompts[0].token_ids:
        makes = "it makes" if noun == "input" else "they make"
        raise invalid_value(noun, f"{makes} an empty prompt.")
    return prompts[0]


async def render_chat(
    tokenizer: Tokenizer, body: ChatBody | TokenizeBody, num_bytes: int, tools: Sequence[Tool] = ()
) -> str:
    """The prompt text of a chat, as the model's template writes it.

    `add_generation_prompt` is true unless the last message is to be continued. `tools` are
    shown by the template or, where that knows none, in words. A large body is rendered in a
    thread; a cancelled wait leaves the thread to finish, and nothing reads the result.

    Args:
        num_bytes: of the request, as a measure of the work.

    Raises:
        InvalidRequestError: a message is not valid, the template refuses the chat, or the model
            has none.
        UnsupportedError: a message holds more than text.
    """
    if num_bytes <= INLINE_BYTES:
        return _rendered(tokenizer, body, tools)
    return await asyncio.to_thread(_rendered, tokenizer, body, tools)


def _rendered(tokenizer: Tokenizer, body: ChatBody | TokenizeBody, tools: Sequence[Tool]) -> str:
    messages = template_messages(body.messages)
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in _RESERVED or not name.isidentifier():
            raise invalid_value("chat_template_kwargs", f"'{name[:64]}' cannot be set.")
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        for name in REASONING_SWITCHES:
            variables.setdefault(name, effort != "none")
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and opens:
        raise InvalidRequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.",
            param="continue_final_message",
            code="invalid_value",
        )
    tool_dicts = None
    try:
        if tools and knows_tools(tokenizer):
            tool_dicts = [tool.to_dict() for tool in tools]
        elif tools:
            messages = described_in_text(messages, tools)
        prompt = tokenizer.render_chat(
            messages,
            tools=tool_dicts,
            add_generation_prompt=opens,
            continue_final_message=continues,
            **variables,
        )
    except ChatTemplateError as error:
        raise InvalidRequestError(str(error)[:1000], param="messages") from None
    except RecursionError:
        # NOTE: whatever works on a document in Python stops at fewer levels than its decoder.
        raise nested_too_deeply() from None
    if effort == "none" and opens:
        return without_reasoning(template_source(tokenizer.assets), prompt)
    return prompt


def template_messages(messages: list[Message] | None) -> list[dict[str, Any]]:
    """Messages as templates read them: content as one string, arguments of tool calls as objects.

    Text parts are joined by line breaks.

    Raises:
        InvalidRequestError: naming the message and field at fault.
        UnsupportedError: a part that is no text.
    """
    if messages is None:
        raise missing_parameter("messages")
    if not messages:
        raise empty_array("messages")
    if len(messages) > MAX_MESSAGES:
        raise long_array("messages", MAX_MESSAGES, len(messages))
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, path: str) -> dict[str, Any]:
    role = message.role
    if role not in ROLES:
        check_choice(f"{path}.role", role, ROLES)
    if message.audio is not None:
        raise UnsupportedError(
            "Unsupported parameter: 'audio' in messages is not supported with this model.",
            param=f"{path}.audio",
        )
    if role == "tool" and message.tool_call_id is None:
        raise missing_parameter(f"{path}.tool_call_id")
    content = _content(message, path)
    if content is None and not (
        role == "assistant" and (message.tool_calls or message.function_call)
    ):
        raise InvalidRequestError(
            "Invalid value for 'content': expected a string, got null.",
            param=f"{path}.content",
            code="invalid_type",
        )
    shown: dict[str, Any] = {"role": _TEMPLATE_ROLES.get(role, role), "content": content or ""}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        shown["reasoning_content"] = message.reasoning_content
    calls = message.tool_calls or []
    if message.function_call is not None:
        calls = [{"type": "function", "function": message.function_call}]
    if calls:
        shown["tool_calls"] = [_tool_call(call) for call in calls]
    return shown


def _content(message: Message, path: str) -> str | None:
    if message.content is None:
        return message.refusal
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for number, part in enumerate(message.content):
        if part.type in _TEXT_PARTS:
            text = part.text
        elif part.type == "refusal":
            text = part.refusal
        elif part.type in _MEDIA_PARTS:
            raise unsupported_value(
                f"{path}.content[{number}].type",
                f"content of type '{part.type}' is not supported with this model; only text is.",
            )
        else:
            check_choice(f"{path}.content[{number}].type", part.type, ("text", "refusal"))
            text = None
        if text is None:
            field = "refusal" if part.type == "refusal" else "text"
            raise missing_parameter(f"{path}.content[{number}].{field}")
        texts.append(text)
    if not texts:
        raise empty_array(f"{path}.content")
    return "\n".join(texts)


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments, JSON in a string, are opened for the template."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
