"""Errors of Parrot's own API, in the form that the original client reads."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from harness.gateway.parrot_v3_client import SAMPLING, V3Client, V3Error
from harness.gateway.v3_service import Model

from parrot_gateway.server.app import create_app
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.model import ParrotV3Settings, Settings


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/session", [], 400, None),
        ("PUT", "/session", {}, 405, None),
        ("POST", "/session/1", {}, 405, None),
        ("DELETE", "/session/abc", {"session_auth": ""}, 400, "session_id"),
        ("DELETE", "/semantic_var/x", {}, 405, None),
        ("POST", "/semantic_call", {"template": "x"}, 400, "session_id"),
        ("POST", "/semantic_call", {"session_id": 1.5}, 400, "session_id"),
        ("POST", "/semantic_var", {"session_id": None}, 400, "session_id"),
        ("GET", "/semantic_var", {"session_auth": ""}, 400, "session_id"),
    ],
)
async def test_every_error_has_the_form_that_the_client_reads(
    client: V3Client, method: str, path: str, body: Any, status: int, param: str | None
) -> None:
    with pytest.raises(V3Error) as caught:
        await client.send(method, path, body)
    assert (caught.value.status, caught.value.error["param"]) == (status, param)
    assert set(caught.value.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"template": "no place"}, "template"),
        ({"model_type": "pixels"}, "model_type"),
        ({"output_criteria": "soon"}, "output_criteria"),
        ({"models": "m"}, "models"),
        (
            {"parameters": [{"name": "out", "is_output": True, "sampling_config": {"n": 2}}]},
            "parameters[0].sampling_config.n",
        ),
        (
            {
                "parameters": [
                    {
                        "name": "out",
                        "is_output": True,
                        "sampling_config": SAMPLING | {"stop_token_ids": [-1]},
                    }
                ]
            },
            "parameters[0].sampling_config.stop_token_ids",
        ),
        (
            {
                "parameters": [
                    {
                        "name": "out",
                        "is_output": True,
                        "sampling_config": SAMPLING | {"logit_bias": {"x": 1}},
                    }
                ]
            },
            "parameters[0].sampling_config.logit_bias",
        ),
    ],
)
async def test_calls_that_cannot_be_honoured_are_refused_by_field(
    client: V3Client, model: Model, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(V3Error) as caught:
        await client.call(**{"template": "say: {{out}}", **changes})
    assert (caught.value.status, caught.value.error["param"]) == (400, param)
    assert model.prompts == []


async def test_an_open_gateway_may_refuse_calls_without_a_key() -> None:
    gateway = Gateway(Settings(parrot_v3=ParrotV3Settings(keyless=False)))
    transport = httpx.ASGITransport(create_app(gateway))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        client = V3Client("http://x", http)
        with pytest.raises(V3Error, match="keyless") as caught:
            await client.register()
        assert caught.value.status == 401
        client.headers = {"authorization": "Bearer anything"}
        await client.register()


async def test_a_body_that_is_no_json_is_told_so(client: V3Client) -> None:
    for content in (b"", b"{", b"\xff"):
        response = await client.http.request(
            "GET", f"{client.root}/v1/semantic_var", content=content
        )
        assert response.status_code == 400
        assert response.json()["traceback"] == ""


async def test_other_routes_keep_their_own_form(client: V3Client) -> None:
    for path in ("/v1/sessions/none", "/v1/variables/none", "/v1/models/none/x"):
        response = await client.http.get(client.root + path)
        assert response.status_code == 404
        assert set(response.json()) == {"error"}
    models = (await client.http.get(f"{client.root}/v1/models")).json()
    assert models["object"] == "list"


async def test_two_outputs_cannot_write_one_variable(client: V3Client) -> None:
    twice = await client.variable("twice")
    with pytest.raises(V3Error) as caught:
        await client.call("say:{{a}} {{b}}", outputs={"a": twice, "b": twice})
    assert (caught.value.status, caught.value.error["param"]) == (409, "parameters[1].var_id")
    written = await client.call("say:x{{a}}", outputs={"a": twice})
    assert await client.get(written["a"]) == "[x]"
