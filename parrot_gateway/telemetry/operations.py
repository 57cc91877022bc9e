"""OpenTelemetry's names of routes' operations, shared by metrics and traces.

https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/
"""

from __future__ import annotations

from typing import Final

#: Value of `gen_ai.provider.name`, whatever is behind the gateway.
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
    """Return `gen_ai.operation.name` for the path of a call's record.

    Routes without a name in the conventions that are passed on are `other`.
    """
    return _OPERATIONS.get(path, "other")
