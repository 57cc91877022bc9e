"""The description of the hot routes for `/openapi.json`, made from the types that they decode.

FastAPI describes its own routes; those that bypass it are added here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI

from parrot_gateway.api.admin.bodies import ADMIN_BODIES, STREAMED_PATHS
from parrot_gateway.api.anthropic.bodies import CountTokensBody, MessagesBody
from parrot_gateway.api.openai.embeddings import EmbeddingBody
from parrot_gateway.api.openai.rerank import RerankBody, ScoreBody
from parrot_gateway.api.responses.bodies import ConversationBody, InputFields, ResponseBody
from parrot_gateway.api.route_texts import TAGS, describe_operation
from parrot_gateway.api.semantic.fields import FIELDS, MAX_ID_CHARACTERS, MAX_PRIORITY
from parrot_gateway.batches.batch import WINDOW
from parrot_gateway.batches.lines import ENDPOINTS
from parrot_gateway.calls.requests.types import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

#: Path, summary, body, and whether it can stream.
_ROUTES: tuple[tuple[str, str, type, bool], ...] = (
    ("/v1/completions", "Create a completion", CompletionBody, True),
    ("/v1/chat/completions", "Create a chat completion", ChatBody, True),
    ("/v1/messages", "Create a message", MessagesBody, True),
    ("/v1/messages/count_tokens", "Count the tokens of a message", CountTokensBody, False),
    ("/v1/responses", "Create a response", ResponseBody, True),
    ("/v1/responses/input_tokens", "Count the input tokens of a response", InputFields, False),
    ("/v1/responses/compact", "Compact a history", InputFields, False),
    ("/v1/conversations", "Create a conversation", ConversationBody, False),
    ("/v1/embeddings", "Create embeddings", EmbeddingBody, False),
    ("/v1/rerank", "Order documents by how well they answer a query", RerankBody, False),
    ("/v1/score", "Score pairs of texts", ScoreBody, False),
    ("/tokenize", "Tokenize a prompt or a chat", TokenizeBody, False),
    ("/detokenize", "Turn token ids into text", DetokenizeBody, False),
)

#: The routes of stored responses and conversations: method, path, summary.
_KEPT: tuple[tuple[str, str, str], ...] = (
    ("GET", "/v1/responses/{response_id}", "A stored response, or its stream once more"),
    ("DELETE", "/v1/responses/{response_id}", "Forget a response"),
    ("POST", "/v1/responses/{response_id}/cancel", "Cancel a response made in the background"),
    ("GET", "/v1/responses/{response_id}/input_items", "What the model was given"),
    ("GET", "/v1/conversations/{conversation_id}", "Describe a conversation"),
    ("POST", "/v1/conversations/{conversation_id}", "Change the metadata of a conversation"),
    ("DELETE", "/v1/conversations/{conversation_id}", "Forget a conversation"),
    ("GET", "/v1/conversations/{conversation_id}/items", "List the items of a conversation"),
    ("POST", "/v1/conversations/{conversation_id}/items", "Add items to a conversation"),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}", "One item"),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}", "Take an item out"),
)

#: The fields that a call has to have, by its body.
_REQUIRED: dict[type, tuple[str, ...]] = {
    CompletionBody: ("model", "prompt"),
    ChatBody: ("model", "messages"),
    MessagesBody: ("model", "messages", "max_tokens"),
    CountTokensBody: ("model", "messages"),
    ResponseBody: ("model",),
    EmbeddingBody: ("model", "input"),
    RerankBody: ("model", "query", "documents"),
    ScoreBody: ("model", "text_1", "text_2"),
}
#: Words that decide which other fields a part of a body has: by type and field.
_KINDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("Block", "type"): (
        "text", "image", "document", "thinking", "redacted_thinking", "tool_use", "tool_result"
    ),
    ("ThinkingConfig", "type"): ("enabled", "adaptive", "disabled"),
    ("ToolChoice", "type"): ("auto", "any", "tool", "none"),
    ("Message", "role"): ("developer", "system", "user", "assistant", "tool", "function"),
}  # fmt: skip

#: The routes whose calls may have semantic fields.
_SEMANTIC = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages"})
_ID = {"type": ["string", "null"], "maxLength": MAX_ID_CHARACTERS}
_FLAG = {"type": ["boolean", "null"]}
_PRIORITY = {"type": ["integer", "null"], "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY}
#: Of the semantic fields that are not any text.
_FIELD_SCHEMAS: dict[str, dict[str, Any]] = {
    "inputs": {"type": ["object", "string", "null"]},
    "defer": _FLAG,
    "priority": _PRIORITY,
    "dedupe": _FLAG,
    "resume": _FLAG,
    "run": _ID,
    "parent": _ID,
    "group": _ID,
}

#: Routes of FastAPI that answer with 503 and a state while the gateway is not ready.
_READY_PATHS = frozenset({"/health", "/health/readiness"})

_JSON_OBJECT = {"application/json": {"schema": {"type": "object"}}}
#: Bodies and answers of our own routes, where they are not just any JSON object.
_OWN_BODIES: dict[str, dict[str, Any]] = {
    **ADMIN_BODIES,
    "/v1/files": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": ["batch"]},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {"type": "integer"},
                },
            }
        }
    },
    "/v1/batches": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["input_file_id", "endpoint", "completion_window"],
                "properties": {
                    "input_file_id": {"type": "string"},
                    "endpoint": {"type": "string", "enum": list(ENDPOINTS)},
                    "completion_window": {"type": "string", "enum": [WINDOW]},
                    "metadata": {"type": ["object", "null"]},
                    "output_expires_after": {"type": ["object", "null"]},
                },
            }
        }
    },
}
_OWN_ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/files/{file_id}/content": {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
    }
}
_OWN_ANSWERS |= {
    path: {"text/event-stream": {}} for path in ("/ui/api/events", "/ui/api/sessions/{id}/events")
}
_OWN_ANSWERS["/v1/streams/{stream_id}"] = {**_JSON_OBJECT, "text/event-stream": {}}
_OWN_ANSWERS |= {path: {**_JSON_OBJECT, "text/event-stream": {}} for path in STREAMED_PATHS}

#: Parameters of our own routes besides those of their paths, by method and path.
_OWN_PARAMETERS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("PUT", "/admin/v1/config"): [
        {
            "name": "If-Match",
            "in": "header",
            "required": True,
            "description": "The ETag of the settings that these replace; * for any.",
            "schema": {"type": "string"},
        }
    ],
    ("GET", "/v1/streams/{stream_id}"): [
        {
            "name": name,
            "in": place,
            "required": False,
            "description": description,
            "schema": {"type": "integer", "minimum": 0},
        }
        for name, place, description in (
            ("Last-Event-ID", "header", "Number of the last event that the client has."),
            ("starting_after", "query", "The same; the header wins."),
        )
    ],
}

_PATH_PARAMETER = re.compile(r"\{(\w+)\}")

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}


def describe_routes(app: FastAPI, routes: Mapping[str, Iterable[tuple[str, str, str]]]) -> None:
    """Make `app.openapi()` describe the routes that do not go through FastAPI.

    Args:
        routes: method, path and summary of each beside the hot ones, by their tag.
    """
    own = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = _with_hot_routes(own())
            for tag, described in routes.items():
                _add_routes(document, described, tag)
            _add_texts(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _with_hot_routes(document: dict[str, Any]) -> dict[str, Any]:
    _correct_management_routes(document)
    bodies = [body for _, _, body, _ in _ROUTES]
    references, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= components | {"Error": _ERROR, "SemanticFields": _semantic_fields()}
    schemas["MessagesError"] = _MESSAGES_ERROR
    for with_parrot in (CompletionBody, ChatBody, MessagesBody):
        properties = schemas[with_parrot.__name__]["properties"]
        properties["parrot"] = {"$ref": "#/components/schemas/SemanticFields"}
    for body, names in _REQUIRED.items():
        _require(schemas[body.__name__], names)
    for (name, field), words in _KINDS.items():
        schemas[name]["properties"][field] = {"enum": list(words)}
    for (path, summary, _, streams), reference in zip(_ROUTES, references, strict=True):
        answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if streams:
            # Without a schema: readers of the document take one for that of a single event.
            answers["text/event-stream"] = {}
        error = "MessagesError" if path.startswith("/v1/messages") else "Error"
        document["paths"][path] = {
            "post": {
                "tags": ["calls"],
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": reference}},
                },
                "responses": {
                    "200": {"description": "The answer", "content": answers},
                    "4XX": _error("The request cannot be honoured", error),
                    "5XX": _error("The gateway or an engine failed", error),
                },
            }
        }
        if path in _SEMANTIC:
            document["paths"][path]["post"]["parameters"] = _semantic_headers()
    _add_routes(document, _KEPT, "calls")
    return document


def _require(schema: dict[str, Any], names: Iterable[str]) -> None:
    """Make fields required whose types are optional: what is missing gets an error of ours."""
    schema["required"] = list(names)
    for name in names:
        field = schema["properties"][name]
        kinds = [kind for kind in field["anyOf"] if kind != {"type": "null"}]
        schema["properties"][name] = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _correct_management_routes(document: dict[str, Any]) -> None:
    """Correct FastAPI's errors: ours have another shape, and no status 422."""
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["4XX"] = _error("The request cannot be honoured")
            if path in _READY_PATHS:
                answer = {"application/json": {"schema": {"type": "object"}}}
                operation["responses"]["503"] = {"description": "Not ready", "content": answer}
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)


def _semantic_fields() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "Semantic variables: docs/semantic-variables.md has the meaning of each.",
        "properties": {
            field: _FIELD_SCHEMAS.get(field, {"type": ["string", "null"]})
            for field in FIELDS.values()
        },
        "additionalProperties": False,
    }


def _semantic_headers() -> list[dict[str, Any]]:
    return [
        {
            "name": header.decode().title(),
            "in": "header",
            "required": False,
            "description": f"As `parrot.{field}` of the body, which wins.",
            "schema": {"type": "string"},
        }
        for header, field in FIELDS.items()
    ]


def _add_routes(document: dict[str, Any], routes: Iterable[tuple[str, str, str]], tag: str) -> None:
    for method, pattern, summary in routes:
        operations = document["paths"].setdefault(pattern, {})
        operations[method.lower()] = _own_route(method, pattern, summary, tag)


def _add_texts(document: dict[str, Any]) -> None:
    """Say what each route does; groups in the order of `TAGS`, others behind them."""
    used: dict[str, None] = dict.fromkeys(TAGS)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            (tag,) = operation["tags"]
            used[tag] = None
            describe_operation(method.upper(), path, tag, operation)
    document["tags"] = [{"name": tag, "description": TAGS.get(tag, "")} for tag in used]


def _own_route(method: str, pattern: str, summary: str, tag: str) -> dict[str, Any]:
    names = _PATH_PARAMETER.findall(pattern)
    route: dict[str, Any] = {
        "tags": [tag],
        "summary": summary or f"{method} {pattern}",
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ],
        "responses": {
            "2XX": {
                "description": "The answer",
                "content": _OWN_ANSWERS.get(pattern, _JSON_OBJECT),
            },
            "4XX": _error("The request cannot be honoured"),
            "5XX": _error("The gateway or an engine failed"),
        },
    }
    route["parameters"] += _OWN_PARAMETERS.get((method, pattern), [])
    if method in ("POST", "PUT"):
        content = _OWN_BODIES.get(pattern, _JSON_OBJECT)
        route["requestBody"] = {"required": True, "content": content}
    return route


def _error(description: str, name: str = "Error") -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
