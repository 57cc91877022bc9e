"""OpenTelemetry's names of what routes do, the same in metrics and in traces.

https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/
"""

from __future__ import annotations

from typing import Final

#: `gen_ai.provider.name`: who answers, whatever is behind the gateway.
PROVIDER: Final = "parrot_gateway"

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/responses/compact": "chat",
    "/v1/completions": "text_completion",
    "/v1/semantic_call": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/score": "score",
    "/score": "score",
}


def operation_of(path: str) -> str:
    """`gen_ai.operation.name` of a call's path, as its record has it.

    Routes that the conventions have no name for, and that are passed on, are `other`.
    """
    return _OPERATIONS.get(path, "other")
