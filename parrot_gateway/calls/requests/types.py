"""The request bodies, as types that msgspec decodes and checks in one pass.

Only what a model of our own engines needs to know; unknown fields are accepted and ignored, as
OpenAI-compatible servers do. Fields that such a model cannot honour are `Any`: `validation`
refuses them by name unless they hold a harmless default.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

MAX_N = 128
MAX_STOP_STRINGS = 4
#: Of one stop string: each candidate of a call carries them to its engine.
MAX_STOP_CHARACTERS = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_METADATA = 16
#: Ids that `/detokenize` takes.
MAX_DETOKENIZED = 1024 * 1024
#: Variables by which chat templates turn reasoning on and off: Qwen's and DeepSeek's names.
REASONING_SWITCHES = ("enable_thinking", "thinking")
_INT32 = 2**31 - 1

Prompts: TypeAlias = str | list[str | int | list[int]]
AtLeast0: TypeAlias = Annotated[int, Meta(ge=0)]
AtLeast1: TypeAlias = Annotated[int, Meta(ge=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
_StopString: TypeAlias = Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)]
Stop: TypeAlias = _StopString | Annotated[list[_StopString], Meta(max_length=MAX_STOP_STRINGS)]
StopTokenIds: TypeAlias = Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)]
LogitBias: TypeAlias = Annotated[
    dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)
]
#: Of responses, conversations and batches: as much as OpenAI takes.
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=MAX_METADATA),
]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    # An extension, named as in vLLM.
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct):
    """Fields that completions and chat have in common."""

    model: str | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    max_tokens: int | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    presence_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    user: str | None = None
    # Extensions, named as in vLLM.
    min_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Structured output, as vLLM names it now and did before; read in `grammars`.
    structured_outputs: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    # The same as SGLang names it.
    ebnf: Any = None
    json_schema: Any = None
    regex: Any = None
    # Extensions of other servers that change the output and are not offered here.
    include_stop_str_in_output: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None


class CompletionBody(SamplingFields):
    """`POST /v1/completions`."""

    prompt: Prompts | None = None
    # A chat's, which was sent to the wrong route where there is no prompt.
    messages: Any = None
    max_tokens: AtLeast0 | None = None
    best_of: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    suffix: Any = None
    # A chat field that vLLM takes here too.
    response_format: Any = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only text and refusals are read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    audio: Any = None


class ChatBody(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: list[Message] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    max_tokens: AtLeast1 | None = None
    max_completion_tokens: AtLeast1 | None = None
    metadata: Annotated[dict[str, Any], Meta(max_length=MAX_METADATA)] | None = None
    reasoning_effort: str | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    # Read in `grammars` and `tools`.
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    # Accepted whatever they say: they ask for nothing that would be missing.
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # Extensions, named as in vLLM.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # An extension, named as in SGLang: false leaves reasoning in the content.
    separate_reasoning: bool | None = None
    # Refused unless harmless.
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TokenizeBody(msgspec.Struct):
    """`POST /tokenize`: of a prompt, or of a chat as its template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Meta(max_length=MAX_DETOKENIZED)] | None = None
    skip_special_tokens: bool | None = None
