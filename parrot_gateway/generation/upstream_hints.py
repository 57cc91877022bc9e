"""Priority hints for upstreams: a call's objective as a field of its body.

vLLM (with `--scheduling-policy priority`) runs smaller priorities earlier, and refuses any but 0
when it does not schedule by priority; SGLang (with `--enable-priority-scheduling`) runs larger
ones earlier, and calls without one last.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from parrot_scheduler.task import OBJECTIVE_KINDS

from parrot_gateway.generation.placement import CallMetadata

HintStyle: TypeAlias = Literal["none", "vllm", "sglang"]

#: Routes whose bodies take a priority.
HINTED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def urgency_of(metadata: CallMetadata) -> int:
    """0 for somebody who waits; smaller is more urgent. The caller's priority comes first."""
    weaker = len(OBJECTIVE_KINDS) - 1 - OBJECTIVE_KINDS.index(metadata.objective.kind)
    return weaker - len(OBJECTIVE_KINDS) * metadata.priority


def with_hints(body: bytes, style: HintStyle, metadata: CallMetadata) -> bytes:
    """`body` with a priority; the very same object when there is nothing to say.

    That is so when the caller gives one himself, and when the body is no JSON object.
    """
    urgency = urgency_of(metadata)
    if style == "none" or (style == "vllm" and urgency == 0):
        return body
    try:
        fields = _fields_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    if "priority" in fields:
        return body
    value = urgency if style == "vllm" else -urgency
    fields["priority"] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)
