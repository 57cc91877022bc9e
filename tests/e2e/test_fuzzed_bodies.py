"""Bodies of the clients' types, rich ones gone wrong and any that the types allow, against the real
process.

A wrong place may be harmless: what counts is that each body is answered, by a result or by an
error in the route's own shape, and never by a fault of the gateway. What is refused has to be
named: without the fields that refusals name, one after the other, every body is taken.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from harness.processes import DEMO_MODEL, GatewayProcess
from harness.raw_http import RawConnection, Response
from harness.typed_values import values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import batch_create_params
from openai.types.responses import input_token_count_params, response_create_params

EXAMPLES = 60
#: A call whose limit was what went wrong ends after this.
CALL_TIMEOUT_S = 1.0
#: Faults that say which, of an engine or of time.
KNOWN_FAULTS = {"timeout", "overloaded_error", "timeout_error", "engine_overloaded"}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CHAT: dict[str, Any] = {
    "model": DEMO_MODEL,
    "messages": [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "n"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "max_completion_tokens": 2,
    "logprobs": True,
    "top_logprobs": 1,
    "stop": ["x"],
    "seed": 1,
    "n": 1,
    "logit_bias": {"5": 1},
    "metadata": {"session_id": "fuzzed"},
    "parrot": {"session": "fuzzed", "priority": 1},
}
FORM: dict[str, Any] = {
    "model": DEMO_MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "w", "schema": SCHEMA, "strict": True},
    },
    "max_tokens": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESPONSE: dict[str, Any] = {
    "model": DEMO_MODEL,
    "instructions": "s",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}},
    "max_output_tokens": 2,
    "temperature": 0.5,
    "store": True,
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "truncation": "auto",
    "reasoning": {"effort": "low"},
}
MESSAGE: dict[str, Any] = {
    "model": DEMO_MODEL,
    "max_tokens": 2,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"city": "x"}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": "sunny"}],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"},
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_k": 5,
    "metadata": {"user_id": "u"},
}
STREAMED = {**RESPONSE, "stream": True}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", FORM),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", STREAMED),
    ("/v1/responses/input_tokens", RESPONSE),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", {**MESSAGE, "stream": True}),
    ("/v1/messages/count_tokens", {k: v for k, v in MESSAGE.items() if k != "max_tokens"}),
]

#: By path: the type of its bodies, and the fields that one has to have, as they are taken.
TYPED: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/responses": (
        response_create_params.ResponseCreateParamsNonStreaming,
        {"model": DEMO_MODEL, "input": "Hi"},
    ),
    "/v1/responses/input_tokens": (
        input_token_count_params.InputTokenCountParams,
        {"model": DEMO_MODEL, "input": "Hi"},
    ),
    "/v1/messages": (
        message_create_params.MessageCreateParamsNonStreaming,
        {"model": DEMO_MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    ),
    "/v1/messages/count_tokens": (
        message_count_tokens_params.MessageCountTokensParams,
        {"model": DEMO_MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    ),
    "/v1/batches": (
        batch_create_params.BatchCreateParams,
        {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": ""},
    ),
}
#: Paths whose answers are written token by token.
LENGTHY = ("/v1/responses", "/v1/messages")
#: Bodies of each path; of how many fields one is made right at most.
TYPED_EXAMPLES = 25
MAX_CORRECTIONS = 40

STRANGE: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**53, 2**64, -(10**30), 1e308, "", "x", "\x00", "\ud800",
    "[[parrot:x]]", "{{x}}", "<tool_call>", "null", [], [None], [[]], [{}], [1], ["x"], {}, {"": 0},
    {"type": "x"}, {"type": None}, {"type": ["object", "null"]}, {"$ref": "#"},
    {"$ref": "#/$defs/x"}, {"pattern": "(a+)+$"}, {"anyOf": []}, {"enum": []},
    {"minLength": 5, "maxLength": 1}, {"type": "array", "minItems": 10**9},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside of a body."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inside:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def spoiled(body: dict[str, Any], changes: list[tuple[int, Any]]) -> dict[str, Any]:
    """The body with other values, or without one (`...`), in places counted from its beginning."""
    body = copy.deepcopy(body)
    for number, value in changes:
        known = list(places(body))
        *path, last = known[number % len(known)]
        holder: Any = body
        for key in path:
            holder = holder[key]
        if value is ...:
            del holder[last]
        else:
            holder[last] = copy.deepcopy(value)
        if not body:
            break
    return body


def check_answer(path: str, response: Response) -> None:
    """A result, or an error in the shape of the route."""
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.status == 200
        assert response.body.endswith(b"\n\n")
        assert b'"code":"server_error"' not in response.body
        return
    answer = response.json
    if response.status == 200:
        return
    error = answer["error"]
    if "/messages" in path:
        assert answer["type"] == "error"
        assert error["message"]
        assert response.status < 500 or error["type"] in KNOWN_FAULTS, error
    else:
        assert set(error) == {"message", "type", "param", "code"}
        assert response.status < 500 or error["code"] in KNOWN_FAULTS, error


def field_at_fault(path: str, response: Response, body: dict[str, Any]) -> str:
    """The field of the body that a refusal names."""
    error = response.json["error"]
    names = [error["param"] or ""] if "param" in error else [error["message"]]
    for name in re.findall(r"[a-z_]+", names[0]):
        if name in body or name in TYPED[path][1]:
            return str(name)
    raise AssertionError(f"no field of {sorted(body)} is named: {error}")


#: Examples that do not change from run to run, however long they take.
_ALWAYS_THE_SAME = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    config = {
        "models": [{"model": DEMO_MODEL, "max_batch_size": 8, "num_blocks": 512}],
        "server": {"call_timeout_s": CALL_TIMEOUT_S},
        "batches": {"folder": str(tmp_path_factory.mktemp("batches"))},
    }
    with GatewayProcess(config=config) as process:
        yield process


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_nothing_breaks(gateway: GatewayProcess, path: str, body: dict[str, Any]) -> None:
    change = st.tuples(st.integers(0, 200), st.sampled_from([..., *STRANGE]))
    with RawConnection(gateway.port) as connection:
        response = connection.ask("POST", path, body)
        assert response.status == 200, response.body

        @settings(_ALWAYS_THE_SAME, max_examples=EXAMPLES)
        @given(st.lists(change, min_size=1, max_size=2))
        def ask(changes: list[tuple[int, Any]]) -> None:
            encoded = json.dumps(spoiled(body, changes)).encode()
            check_answer(path, connection.ask("POST", path, encoded))

        ask()
    assert "Traceback" not in gateway.stderr()


def upload(connection: RawConnection, content: bytes, **fields: str) -> Response:
    """Send a file as the clients do."""
    parts = b"".join(
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    )
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    form = parts + head + content + b"\r\n--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    return connection.ask("POST", "/v1/files", form, headers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TYPED)
def test_what_is_refused_is_named(gateway: GatewayProcess, path: str, stream: bool) -> None:
    if stream and path not in LENGTHY:
        pytest.skip("its answers are not streamed")
    typed, needed = TYPED[path]
    taken = 0
    with RawConnection(gateway.port) as connection:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
        uploaded = upload(connection, json.dumps(line).encode(), purpose="batch").json["id"]

        @settings(_ALWAYS_THE_SAME, max_examples=TYPED_EXAMPLES)
        @given(values(typed))
        def ask(body: dict[str, Any]) -> None:
            nonlocal taken
            right = copy.deepcopy(needed)
            if "input_file_id" in right:
                right["input_file_id"] = uploaded
            if stream:
                right["stream"] = body["stream"] = True
            for _ in range(MAX_CORRECTIONS):
                length = "max_tokens" if "max_tokens" in right else "max_output_tokens"
                if path in LENGTHY and (body.get(length) or 3) > 2:
                    body[length] = 2
                response = connection.ask("POST", path, json.dumps(body).encode())
                check_answer(path, response)
                if not 400 <= response.status < 500:
                    taken += response.status == 200
                    return
                name = field_at_fault(path, response, body)
                if name in right:
                    assert body.get(name) != right[name], response.body
                    body[name] = right[name]
                else:
                    del body[name]
            raise AssertionError(f"never taken: {body}")

        ask()
    assert taken > TYPED_EXAMPLES // 2
    assert "Traceback" not in gateway.stderr()


LINES = st.lists(
    st.one_of(
        st.sampled_from([b"", b"x", b"{}", b"[]", b"null", b"\xff", b'{"custom_id": "a"}']),
        st.builds(
            lambda n, url, body: json.dumps(
                {"custom_id": n, "method": "POST", "url": url, "body": body}
            ).encode(),
            st.sampled_from(["a", "b", "", None, 5]),
            st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/x"]),
            st.sampled_from([{}, None, CHAT, RESPONSE, {"model": DEMO_MODEL, "prompt": "x"}]),
        ),
    ),
    max_size=4,
)


def test_files_of_any_lines(gateway: GatewayProcess) -> None:
    taken = 0
    with RawConnection(gateway.port) as connection:

        @settings(_ALWAYS_THE_SAME, max_examples=EXAMPLES)
        @given(
            LINES,
            st.sampled_from(["batch", "batch", "fine-tune", ""]),
            st.dictionaries(
                st.sampled_from(["expires_after[anchor]", "expires_after[seconds]", "x"]),
                st.sampled_from(["created_at", "3600", "86400", "-1", "", "é"]),
            ),
            st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/responses"]),
        )
        def ask(lines: list[bytes], purpose: str, fields: dict[str, str], endpoint: str) -> None:
            nonlocal taken
            response = upload(connection, b"\n".join(lines), purpose=purpose, **fields)
            check_answer("/v1/files", response)
            if response.status != 200:
                assert response.json["error"]["param"], response.body
                return
            file_id = response.json["id"]
            batch = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
            made = connection.ask("POST", "/v1/batches", batch)
            check_answer("/v1/batches", made)
            taken += made.status == 200
            for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
                assert connection.ask("GET", path).status == 200

        ask()
    assert taken > 0


def test_nothing_is_left_running(gateway: GatewayProcess) -> None:
    assert gateway.wait_idle()["running"] == 0
