"""The request bodies, as types that msgspec decodes and checks in one pass.

Only what a model of our own engines needs to know; unknown fields are accepted and ignored, as
OpenAI-compatible servers do. Fields that such a model cannot honour are `Any`: `validation`
refuses them by name unless they hold a harmless default. Ranges are checked there too.
"""

from __future__ import annotations

from typing import Any

import msgspec

Prompts = str | list[str | int | list[int]]


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(msgspec.Struct):
    """What completions and chat have in common."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    # Extensions, named as in vLLM.
    min_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    # Structured output, as vLLM names it now and did before; read in `structured`.
    structured_outputs: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    # Extensions of other servers that change the output and are not offered here.
    include_stop_str_in_output: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None


class CompletionBody(SamplingFields):
    """`POST /v1/completions`."""

    prompt: Prompts | None = None
    # A chat's, which was sent to the wrong route where there is no prompt.
    messages: Any = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None
    # A chat field that vLLM takes here too.
    response_format: Any = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only text and refusals are read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct):
    """One message of a chat."""

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
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    # Read in `structured` and `tool_fields`.
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
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int] | None = None
    skip_special_tokens: bool | None = None
