"""The request bodies of `/v1/messages`, as types that msgspec decodes and checks in one pass.

Unknown fields are accepted and ignored. `cache_control` has no effect: prefixes are cached without
it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from parrot_gateway.calls.requests.types import MAX_STOP_CHARACTERS, AtLeast0, Fraction

MAX_STOP_SEQUENCES = 64
_StopSequence = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class Block(msgspec.Struct):
    """One block of content; which fields it has depends on `type`."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    source: dict[str, Any] | None = None
    thinking: str | None = None
    signature: str | None = None


class MessageParam(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesMetadata(msgspec.Struct):
    user_id: str | None = None


class ThinkingConfig(msgspec.Struct):
    type: str
    budget_tokens: AtLeast0 | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensBody(msgspec.Struct):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: list[MessageParam] | None = None
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    #: The older place of `output_config.format`.
    output_format: dict[str, Any] | None = None
    thinking: ThinkingConfig | None = None
    # Accepted, without effect.
    cache_control: Any = None
    context_management: Any = None
    speed: Any = None
    user_profile_id: Any = None
    # Refused unless empty.
    container: Any = None
    mcp_servers: Any = None


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`."""

    max_tokens: AtLeast0 | None = None
    stop_sequences: Annotated[list[_StopSequence], Meta(max_length=MAX_STOP_SEQUENCES)] | None = (
        None
    )
    stream: bool | None = None
    temperature: Fraction | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: MessagesMetadata | None = None
    # Accepted, without effect.
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None
