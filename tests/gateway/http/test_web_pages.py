"""Web pages that may use the gateway: content types, `Origin`, `Host`, CORS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving

BODY = {"model": "m", "prompt": "Hi", "max_tokens": 1}
PAGE = "https://app.example.com"
JSON = {"content-type": "application/json"}


async def ask(
    service: Service, method: str = "POST", path: str = "/v1/completions", **headers: str
) -> httpx.Response:
    """A call with these headers; underscores stand for dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(trust_env=False) as client:
        content = httpx.Request("POST", "http://x", json=BODY).content
        body = content if method == "POST" else None
        return await client.request(method, service.root + path, content=body, headers=named)


def code_of(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


@pytest.fixture
async def keyed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setenv("PARROT_API_KEY", "secret")
    async with serving(ScriptedRemoteEngine()) as running:
        yield running


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "Application/JSON",
     "application/vnd.api+json"],
)  # fmt: skip
async def test_json_is_taken(service: Service, content_type: str) -> None:
    assert (await ask(service, content_type=content_type)).status_code == 200


async def test_a_program_may_leave_the_content_type_out(service: Service) -> None:
    assert (await ask(service)).status_code == 200


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded",
     "multipart/form-data; boundary=b", "application/octet-stream", "x", ""],
)  # fmt: skip
async def test_what_is_not_json_is_refused_without_a_key(
    service: Service, content_type: str
) -> None:
    response = await ask(service, content_type=content_type)
    assert code_of(response) == (415, "unsupported_media_type")
    assert "Content-Type: application/json" in response.json()["error"]["message"]
    assert ("curl" in response.text) == content_type.endswith("urlencoded")
    assert service.gate.accepted == 0


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/tokenize", "/v1/resolve", "/v1/responses", "/v1/session",
     "/v1/semantic_call"],
)  # fmt: skip
async def test_every_route_refuses_plain_text(service: Service, path: str) -> None:
    response = await ask(service, path=path, content_type="text/plain")
    assert code_of(response) == (415, "unsupported_media_type")


async def test_with_a_key_any_content_type_does(keyed: Service) -> None:
    key = {"authorization": "Bearer secret", "host": "rebound.example.com", "origin": PAGE}
    for content_type in ("text/plain", "application/x-www-form-urlencoded"):
        response = await ask(keyed, content_type=content_type, **key)
        assert response.status_code == 200


@pytest.mark.parametrize("origin", [PAGE, "http://evil.example:8000", "null", "chrome-extension:"])
@pytest.mark.parametrize("headers", [JSON, {"content-type": "text/plain"}, {}])
async def test_pages_of_others_are_refused(
    service: Service, origin: str, headers: dict[str, str]
) -> None:
    response = await ask(service, origin=origin, **headers)
    assert code_of(response) == (403, "origin_not_allowed")
    assert "server.cors_origins" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1:1", "http://[::1]:5173",
               "http://app.localhost"],
)  # fmt: skip
async def test_pages_of_this_machine_are_not(service: Service, origin: str) -> None:
    assert (await ask(service, origin=origin, **JSON)).status_code == 200


async def test_the_gateways_own_pages_may_call_it(service: Service) -> None:
    headers = {"host": "10.1.2.3:80", "origin": "http://10.1.2.3:80"}
    assert (await ask(service, **headers, **JSON)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health", "/v1/sessions", "/x"])
@pytest.mark.parametrize("host", ["rebound.example.com", "rebound.example.com:8000", "a.b."])
async def test_a_name_of_somebody_elses_is_refused(service: Service, path: str, host: str) -> None:
    method = "POST" if path == "/v1/completions" else "GET"
    response = await ask(service, method, path, host=host, **JSON)
    assert code_of(response) == (403, "host_not_allowed")
    assert "server.allowed_hosts" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "127.8.8.8", "[::1]:8000", "10.0.0.7",
             "api.localhost", "host.docker.internal:8000", "gateway"],
)  # fmt: skip
async def test_names_that_no_stranger_has_are_taken(service: Service, host: str) -> None:
    assert (await ask(service, host=host, **JSON)).status_code == 200


async def test_further_names_and_pages_come_from_the_settings() -> None:
    server: dict[str, Any] = {"allowed_hosts": ["llm.example.com"], "cors_origins": [PAGE]}
    async with serving(ScriptedRemoteEngine(), server=server) as service:
        assert (await ask(service, host="LLM.example.com:443", **JSON)).status_code == 200
        assert (await ask(service, host="x.example.com", **JSON)).status_code == 403
        assert (await ask(service, origin=PAGE, **JSON)).status_code == 200
        # A page that may still needs a preflight.
        assert (await ask(service, origin=PAGE, content_type="text/plain")).status_code == 415
        assert (await ask(service, origin=f"{PAGE}.evil.org", **JSON)).status_code == 403


async def test_any_name_and_any_page_can_be_allowed() -> None:
    server: dict[str, Any] = {"allowed_hosts": ["*"], "cors_origins": ["*"]}
    async with serving(ScriptedRemoteEngine(), server=server) as service:
        response = await ask(service, host="any.example.com", origin="null", **JSON)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "*"


PREFLIGHT = {
    "access_control_request_method": "POST",
    "access_control_request_headers": "authorization,content-type,x-parrot-session",
}


async def test_there_is_no_cors_by_default(service: Service) -> None:
    for method, headers in (("OPTIONS", PREFLIGHT), ("POST", JSON)):
        response = await ask(service, method, origin="http://localhost:3000", **headers)
        assert not [name for name in response.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
async def test_a_refused_preflight_names_the_setting(service: Service, path: str) -> None:
    refused = await ask(service, "OPTIONS", path, origin="http://localhost:3000", **PREFLIGHT)
    assert refused.status_code == 405
    message = refused.json()["error"]["message"]
    assert "'http://localhost:3000'" in message
    assert "server.cors_origins" in message
    plain = await ask(service, "OPTIONS", path)
    assert "cors_origins" not in plain.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/responses"])
async def test_a_preflight_needs_no_key(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("PARROT_API_KEY", "secret")
    async with serving(ScriptedRemoteEngine(), server={"cors_origins": [PAGE]}) as service:
        response = await ask(service, "OPTIONS", path, origin=PAGE, **PREFLIGHT)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == PAGE
        allowed = response.headers["access-control-allow-headers"].lower()
        assert set(allowed.split(",")) >= {"authorization", "content-type", "x-parrot-session"}
        assert "POST" in response.headers["access-control-allow-methods"]
        refused = await ask(service, "OPTIONS", path, origin="https://other.org", **PREFLIGHT)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers


async def test_pages_may_read_answers_errors_and_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARROT_API_KEY", "secret")
    async with serving(ScriptedRemoteEngine(), server={"cors_origins": [PAGE]}) as service:
        answers = [
            await ask(service, origin=PAGE, authorization="Bearer secret", **JSON),
            await ask(service, origin=PAGE, **JSON),
            await ask(service, "GET", "/v1/models", origin=PAGE, authorization="Bearer secret"),
            await ask(service, "GET", "/nothing", origin=PAGE, authorization="Bearer secret"),
        ]
    assert [answer.status_code for answer in answers] == [200, 401, 200, 404]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-expose-headers"] == "*"
        assert answer.headers["x-request-id"]
