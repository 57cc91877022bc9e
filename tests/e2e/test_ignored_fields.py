"""Fields without a meaning for own models: named, never refused, never passed over in silence."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from harness.processes import DEMO_MODEL, GatewayProcess
from harness.raw_http import RawConnection
from harness.scripted_upstream import ScriptedUpstream, chat_document, document

CHAT = {"messages": [{"role": "user", "content": "hi"}], "model": DEMO_MODEL, "max_tokens": 2}
TEXT = {"prompt": "hi", "model": DEMO_MODEL, "max_tokens": 2}
ITEMS = {"input": "hi", "model": DEMO_MODEL}
COUNTED = {"messages": CHAT["messages"], "model": DEMO_MODEL}
#: Paths whose answers cannot be streamed.
WHOLE = ("responses/input_tokens", "responses/compact", "messages/count_tokens")
BODIES = [
    ("chat/completions", CHAT),
    ("completions", TEXT),
    ("responses", {**ITEMS, "max_output_tokens": 2}),
    ("responses/input_tokens", ITEMS),
    ("responses/compact", ITEMS),
    ("messages", CHAT),
    ("messages/count_tokens", COUNTED),
]
#: Fields that have a meaning, or whose lack of one is documented.
KNOWN: dict[str, dict[str, Any]] = {
    "responses": {"prompt_cache_key": "k", "service_tier": "auto", "include": []},
    "messages": {"cache_control": {"type": "ephemeral"}, "service_tier": "auto"},
    "chat": {"prompt_cache_key": "k"},
}


def answer_to(demo: GatewayProcess, path: str, body: dict[str, Any]) -> Any:
    with RawConnection(demo.port) as connection:
        key = {"Authorization": f"Bearer {demo.api_key}"}
        return connection.ask("POST", f"/v1/{path}", body, key)


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
@pytest.mark.parametrize("options", [{}, {"stream": True}])
def test_they_are_named(
    demo: GatewayProcess, path: str, body: dict[str, Any], options: dict[str, Any]
) -> None:
    if options and path in WHOLE:
        pytest.skip("its answers are not streamed")
    response = answer_to(demo, path, {**body, **options, "max_token": 5, "made_up": "secret"})
    assert response.status == 200
    assert response.headers["x-parrot-ignored"] == "max_token, made_up"
    more = {} if path in WHOLE else {"metadata": {}, **KNOWN.get(path.partition("/")[0], {})}
    known = answer_to(demo, path, {**body, **options, **more})
    assert known.status == 200
    assert "x-parrot-ignored" not in known.headers


@pytest.mark.parametrize("parrot", [{"defer": True}, {"output": "x"}])
def test_of_semantic_calls_too(demo: GatewayProcess, parrot: dict[str, Any]) -> None:
    body = {**TEXT, "parrot": {"session": str(parrot), **parrot}}
    assert "x-parrot-ignored" not in answer_to(demo, "completions", body).headers
    body = {**TEXT, "parrot": {"session": f"{parrot} 2", **parrot}, "max_token": 5}
    assert answer_to(demo, "completions", body).headers["x-parrot-ignored"] == "max_token"


def test_the_log_names_a_field_once_and_no_value(demo: GatewayProcess) -> None:
    for _ in range(3):
        answer_to(demo, "completions", {**TEXT, "seen_once": "a value"})
    log = demo.stdout() + demo.stderr()
    assert log.count("'seen_once'") == 1
    assert "a value" not in log


def test_the_header_is_bounded_and_plain(demo: GatewayProcess) -> None:
    names = ["x" * 1000, "a\r\nx-evil: 1", "\u00e4, b", *(f"f{n}" for n in range(100))]
    response = answer_to(demo, "completions", {**TEXT, **dict.fromkeys(names, 1)})
    ignored = response.headers["x-parrot-ignored"].split(", ")
    assert ignored[:3] == ["x" * 48 + "...", "a??x-evil:?1", "???b"]
    assert len(ignored) == 17
    assert ignored[-1] == "..."
    assert "x-evil" not in response.headers


def test_what_is_wrong_is_refused_as_before(demo: GatewayProcess) -> None:
    response = answer_to(demo, "completions", {**TEXT, "made_up": 1, "temperature": 9})
    assert (response.status, response.json["error"]["param"]) == (400, "temperature")
    response = answer_to(demo, "completions", {**TEXT, "made_up": 1, "temperature": "x"})
    assert (response.status, response.json["error"]["param"]) == (400, "temperature")


def test_the_real_client_sees_it(demo: GatewayProcess) -> None:
    client = openai.OpenAI(base_url=demo.base_url, api_key=demo.api_key or "", max_retries=0)
    raw = client.chat.completions.with_raw_response.create(**CHAT, extra_body={"regexp": "a+"})
    assert raw.headers["x-parrot-ignored"] == "regexp"


def test_upstreams_get_all_fields(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    model = upstream.script(document(chat_document("x")))
    with RawConnection(relay.port) as connection:
        body = {**CHAT, "model": model, "made_up": 1}
        response = connection.ask("POST", "/v1/chat/completions", body)
    assert "x-parrot-ignored" not in response.headers
    assert upstream.calls(model)[0].json["made_up"] == 1


def test_a_message_for_an_upstream_is_written_anew(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document(chat_document("x")))
    with RawConnection(relay.port) as connection:
        body = {**CHAT, "model": model, "made_up": 1}
        response = connection.ask("POST", "/v1/messages", body)
    assert response.status == 200
    assert response.headers["x-parrot-ignored"] == "made_up"
    assert "made_up" not in upstream.calls(model)[0].json


@pytest.mark.parametrize("name", ["", " ", "`", "x - at `$.y`", "\u00e4", "parrot_", "null"])
@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_names_of_any_kind(
    demo: GatewayProcess, path: str, body: dict[str, Any], name: str
) -> None:
    response = answer_to(demo, path, {**body, name: 1})
    assert response.status == 200, response.body
    assert "x-parrot-ignored" in response.headers
