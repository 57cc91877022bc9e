"""Texts of the OpenAPI document for each route: a description, an example, its errors.

Texts alone; routes and fields come from the code that answers them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class RouteText(NamedTuple):
    """The description of a route beyond its summary, and a body that it takes."""

    description: str
    example: Any = None


#: Groups of routes, in the order of the document.
TAGS: dict[str, str] = {
    "calls": "Calls to models: OpenAI's and Anthropic's APIs, on own engines and upstreams.",
    "models": "What is served, under which names.",
    "sessions": "Sessions, their variables, calls and graphs: what is known of applications.",
    "batches": "Files of calls that run behind all others.",
    "Parrot's own API": "The API of the original Parrot, for programs written for it.",
    "health": "State of the gateway, for probes and Prometheus.",
    "admin": "For operators: models and engines at run time. Behind `server.admin_key`.",
    "live page": "What the page at `/ui` shows. Behind the admin key where there is one.",
}

_MODEL = "parrot-demo"
_MESSAGES = [{"role": "user", "content": "Once upon a time"}]
_STREAMS = (
    "`stream: true` sends server-sent events, the last one `[DONE]`. Parameters that are not known "
    "here go to upstreams unchanged and are refused for own models."
)
_VARIABLES = (
    "The headers `X-Parrot-…`, or `parrot` in the body, make it a part of a graph: "
    "docs/semantic-variables.md."
)

#: By method and path.
ROUTES: dict[tuple[str, str], RouteText] = {
    ("POST", "/v1/completions"): RouteText(
        f"Goes on from a prompt. {_STREAMS} {_VARIABLES}",
        {"model": _MODEL, "prompt": "Once upon a time", "max_tokens": 40},
    ),
    ("POST", "/v1/chat/completions"): RouteText(
        f"Answers a conversation, with tools and structured output. {_STREAMS} {_VARIABLES}",
        {"model": _MODEL, "messages": _MESSAGES, "max_tokens": 40},
    ),
    ("POST", "/v1/messages"): RouteText(
        "Anthropic's API: unchanged to upstreams that speak it, translated into chats for other "
        "models. The key may be sent as `x-api-key`.",
        {"model": _MODEL, "max_tokens": 40, "messages": _MESSAGES},
    ),
    ("POST", "/v1/messages/count_tokens"): RouteText(
        "Tokens of the prompt that `/v1/messages` would make, by the model's own tokenizer.",
        {"model": _MODEL, "messages": _MESSAGES},
    ),
    ("POST", "/v1/responses"): RouteText(
        "Answers with typed items. Responses are kept: `previous_response_id` goes on from one, "
        "`background: true` makes one without waiting. `stream: true` sends typed events.",
        {"model": _MODEL, "input": "Once upon a time", "max_output_tokens": 40},
    ),
    ("POST", "/v1/responses/input_tokens"): RouteText(
        "Tokens of the prompt that `/v1/responses` would make.",
        {"model": _MODEL, "input": "Once upon a time"},
    ),
    ("POST", "/v1/responses/compact"): RouteText(
        "Gives a shorter history that stands for the one given.",
        {"model": _MODEL, "input": "Once upon a time"},
    ),
    ("POST", "/v1/conversations"): RouteText(
        "A conversation holds items; responses that name it read them and add theirs.",
        {"metadata": {"topic": "parrots"}},
    ),
    ("POST", "/v1/embeddings"): RouteText(
        "One vector for each text, pooled and normalised as the checkpoint says.",
        {"model": _MODEL, "input": ["Paris is in France.", "Fish swim."]},
    ),
    ("POST", "/v1/rerank"): RouteText(
        "Scores documents against a query, best first. Also at `/rerank` and `/v2/rerank`.",
        {
            "model": "reranker",
            "query": "Where is Paris?",
            "documents": ["Paris is in France.", "Fish swim."],
        },
    ),
    ("POST", "/v1/score"): RouteText(
        "Scores each of `text_2` against `text_1`, or pair by pair. Also at `/score`.",
        {
            "model": "reranker",
            "text_1": "Where is Paris?",
            "text_2": ["Paris is in France.", "Fish swim."],
        },
    ),
    ("POST", "/tokenize"): RouteText(
        "Token ids of a prompt, or of a chat under the model's template.",
        {"model": _MODEL, "prompt": "Once upon a time"},
    ),
    ("POST", "/detokenize"): RouteText(
        "The text of token ids.", {"model": _MODEL, "tokens": [1, 2, 3]}
    ),
    ("GET", "/v1/responses/{response_id}"): RouteText(
        "A response that is still being made is `in_progress`. `stream=true` sends its events once "
        "more, those behind `starting_after`."
    ),
    ("POST", "/v1/conversations/{conversation_id}"): RouteText(
        "Replaces the metadata.", {"metadata": {"topic": "parrots"}}
    ),
    ("POST", "/v1/conversations/{conversation_id}/items"): RouteText(
        "Adds items behind those that are there.",
        {"items": [{"type": "message", "role": "user", "content": "Hello"}]},
    ),
    ("GET", "/v1/streams/{stream_id}"): RouteText(
        "Of a call with `X-Parrot-Resume`: the events behind `Last-Event-ID`, live if the call "
        "still runs; 204 behind the last one. 404 `stream_not_found`, 410 `events_gone`: too late."
    ),
    ("GET", "/v1/models"): RouteText(
        "Models of own engines and of upstreams, adapters and aliases. `UPSTREAM/model` names one "
        "that an upstream does not list."
    ),
    ("POST", "/v1/variables"): RouteText(
        "A value that calls can read as `{{name}}`; without one it is set later.",
        {"session": "my-app", "name": "topic", "value": "parrots"},
    ),
    ("GET", "/v1/variables/{id}"): RouteText(
        "Waits until the call that writes it has ended, `timeout` seconds at most; with `Accept: "
        "text/event-stream` its text comes as it is written. Fails with the cause where that call "
        "did."
    ),
    ("PUT", "/v1/variables/{id}"): RouteText("Variables are written once.", {"value": "parrots"}),
    ("POST", "/v1/resolve"): RouteText(
        "Waits for the variables that references stand for.", {"text": "About [[parrot:…]]"}
    ),
    ("GET", "/v1/sessions/{id}/graph"): RouteText(
        "Calls with states and times, variables, and how they are linked: declared and inferred. "
        "`format=mermaid` draws it."
    ),
    ("GET", "/v1/calls/{id}"): RouteText(
        "By the call's id, the `x-request-id` of its request or the id of its answer: its session, "
        "links to other calls with kinds and confidence, and why it was placed as it was."
    ),
    ("GET", "/v1/linking/profiles"): RouteText(
        "Templates of prompts that were found: lengths of answers, what follows, how long clients "
        "think in between."
    ),
    ("POST", "/v1/files"): RouteText(
        "A form with `file` and `purpose: batch`; a line is "
        '`{"custom_id", "method": "POST", "url", "body"}`.'
    ),
    ("POST", "/v1/batches"): RouteText(
        "Runs the lines of a file as throughput work; their answers are a file too.",
        {"input_file_id": "file-…", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ),
    ("POST", "/v1/session"): RouteText("Begins a session; the answer has its id and secret.", {}),
    ("POST", "/v1/semantic_call"): RouteText(
        "A template with inputs and outputs, each a parameter: calls wait for what they read.",
        {
            "session_id": 1,
            "session_auth": "…",
            "template": "Tell of {{topic}}: {{story}}",
            "parameters": [
                {"name": "topic", "is_output": False, "value": "parrots"},
                {"name": "story", "is_output": True, "sampling_config": {"max_gen_length": 40}},
            ],
        },
    ),
    ("POST", "/v1/semantic_var"): RouteText(
        "A variable of a session.", {"session_id": 1, "session_auth": "…", "var_name": "topic"}
    ),
    ("POST", "/v1/semantic_var/{var_id}"): RouteText(
        "Variables are written once.", {"session_id": 1, "session_auth": "…", "content": "parrots"}
    ),
    ("GET", "/v1/semantic_var/{var_id}"): RouteText(
        "Waits until the value is there, `parrot_v3.get_timeout_s` at most."
    ),
    ("POST", "/v1/transform"): RouteText(
        "Applies a text function of docs/transforms.md to a variable once it is there.",
        {
            "session_id": 1,
            "session_auth": "…",
            "transform": "strip | lines | take(3)",
            "input": "…",
        },
    ),
    ("GET", "/health"): RouteText(
        "`status` alone without the key; with it engines, upstreams, breakers and calls in work."
    ),
    ("GET", "/health/readiness"): RouteText(
        "200 once models are loaded or upstreams known; 503 before, while draining and at the end."
    ),
    ("GET", "/metrics"): RouteText("In Prometheus's text format: docs/observability.md."),
    ("POST", "/admin/v1/models/pull"): RouteText(
        "Progress as events with `stream: true`; files that are there are kept.",
        {"model": "Qwen/Qwen3-0.6B"},
    ),
    ("POST", "/admin/v1/models/cancel"): RouteText(
        "Waits until it has ended.", {"model": "Qwen/Qwen3-0.6B"}
    ),
    ("POST", "/admin/v1/models/load"): RouteText(
        "Takes the settings of `models`. Progress as events with `stream: true`.",
        {"model": "Qwen/Qwen3-0.6B"},
    ),
    ("POST", "/admin/v1/models/unload"): RouteText(
        "Calls that still run after `engines.unload_timeout_s` are cut off.",
        {"model": "Qwen/Qwen3-0.6B"},
    ),
    ("POST", "/v1/load_lora_adapter"): RouteText(
        "From a folder below the model's `adapter_folders`.",
        {"lora_name": "sql", "lora_path": "/adapters/sql"},
    ),
    ("POST", "/v1/unload_lora_adapter"): RouteText("By its name.", {"lora_name": "sql"}),
    ("GET", "/admin/v1/config"): RouteText(
        "Settings as they are, where those come from that are not as by default, and which can be "
        "changed while the gateway runs. `ETag` names this state."
    ),
    ("PUT", "/admin/v1/config"): RouteText(
        "Takes all settings that are not as by default, as JSON or YAML, in the place of file, "
        "environment and command line. `If-Match` names the state that they are a change of.",
        {"server": {"log_level": "debug"}, "models": [_MODEL]},
    ),
    ("POST", "/admin/v1/engines/{engine}/drain"): RouteText(
        "By id or name; `UPSTREAM` means all its servers. Calls that wait go to other engines.", {}
    ),
    ("POST", "/admin/v1/engines/{engine}/undrain"): RouteText("By id or name.", {}),
    ("POST", "/admin/v1/undrain"): RouteText("Takes back what `/admin/v1/drain` did.", {}),
    ("POST", "/v1/responses/{response_id}/cancel"): RouteText(
        "What was made so far stays in the response.", {}
    ),
    ("POST", "/v1/batches/{batch_id}/cancel"): RouteText(
        "Lines in work are ended; answers that are there stay in the output file.", {}
    ),
    ("POST", "/admin/v1/drain"): RouteText(
        "Readiness is a 503 at once; after `refuse_after_s` new calls are refused with a 503.",
        {"refuse_after_s": 30},
    ),
}

_FIELDS = "400 `invalid_value`, `invalid_type`, `unknown_parameter`, …: `param` names the field"
_KEY = "401 `invalid_api_key`"
_ADMIN = "401 `invalid_admin_key`; 403 `admin_routes_off`"
_BODY = "413 `request_too_large`; 415 `unsupported_media_type`"
_LATER = "503 with `retry-after`: `shutting_down`"
#: Errors of the routes with a tag: those that are the caller's, and those that are not.
_ERRORS: dict[str, tuple[str, str]] = {
    "calls": (
        f"{_FIELDS}; 400 `context_length_exceeded`, `unsupported_parameter`; {_KEY}; 404 "
        "`model_not_found`",
        f"502 `upstream_error`; {_LATER}, `engine_overloaded`, `model_loading`, "
        "`upstream_unavailable`, `drained`, `queue_full`; 504 `timeout`, `upstream_timeout`",
    ),
    "models": (f"{_KEY}; 404 `model_not_found`", _LATER),
    "sessions": (
        f"{_FIELDS}; {_KEY}; 404 `session_not_found`, `variable_not_found`, `call_not_found`; 409 "
        "`variable_already_written`, `call_cancelled`; 424 `dependency_failed`",
        f"{_LATER}, `linking_behind`; 504 `timeout`",
    ),
    "batches": (f"{_FIELDS}; {_KEY}; 404 `not_found`", _LATER),
    "Parrot's own API": (
        f"{_FIELDS}; {_KEY}; 404 `session_not_found`, `variable_not_found`; 424 "
        "`dependency_failed`",
        f"{_LATER}; 504 `timeout`",
    ),
    "health": ("405 `method_not_allowed`", ""),
    "admin": (
        f"{_FIELDS}; {_ADMIN}; 404 `model_not_found`, `engine_not_found`; 409 "
        "`model_already_loaded`, …; 422 `model_load_failed`",
        f"502 `hub_unreachable`, …; {_LATER}; 507 `disk_full`",
    ),
    "live page": (f"{_KEY}, or `invalid_admin_key`; 404 `session_not_found`, `call_not_found`", ""),
}


def describe_operation(method: str, path: str, tag: str, operation: dict[str, Any]) -> None:
    """Add what is known of a route to its operation in the document.

    Args:
        method: upper case.
        path: with its parameters, as in the document.
        tag: of the group that it is in.
        operation: changed: description, example of the body, descriptions of errors.
    """
    text = ROUTES.get((method, path))
    operation["summary"] = " ".join(str(operation["summary"]).split())
    operation["description"] = text.description if text else f"{operation['summary']}."
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None and text is not None and text.example is not None:
        # Of this operation alone: content may be shared.
        operation["requestBody"] = {
            **operation["requestBody"],
            "content": {"application/json": {**content, "example": text.example}},
        }
    theirs, ours = _ERRORS.get(tag, ("", ""))
    if "requestBody" in operation and theirs:
        theirs = f"{theirs}; {_BODY}"
    for status, described in (("4XX", theirs), ("5XX", ours)):
        if described and status in operation["responses"]:
            answer = operation["responses"][status]
            operation["responses"][status] = {**answer, "description": described}
