"""Compressed request bodies."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx
import pytest
from harness.gateway.relaying import relaying
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving

from parrot_gateway.exceptions import RequestTooLargeError
from parrot_gateway.http.content_encoding import decompress

BODY = {"model": "m", "prompt": "Hi", "max_tokens": 1}
LIMIT = 64 * 1024


async def post(
    service: Service, body: bytes, encoding: str, path: str = "/v1/completions"
) -> httpx.Response:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(service.root + path, content=body, headers=headers)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_gzip_is_taken(service: Service, encoding: str, path: str) -> None:
    body: dict[str, Any] = dict(BODY)
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    packed = gzip.compress(json.dumps(body).encode())
    assert (await post(service, packed, encoding, path)).status_code == 200


async def test_a_plain_body_may_say_so(service: Service) -> None:
    assert (await post(service, json.dumps(BODY).encode(), "identity")).status_code == 200


@pytest.mark.parametrize("encoding", ["br", "zstd", "deflate", "gzip, gzip", "x"])
async def test_other_codings_are_refused(service: Service, encoding: str) -> None:
    response = await post(service, zlib.compress(json.dumps(BODY).encode()), encoding)
    assert code_of(response) == (415, "unsupported_content_encoding")
    assert "send gzip" in response.json()["error"]["message"]


async def test_a_bomb_is_refused() -> None:
    async with serving(ScriptedRemoteEngine(), server={"max_body_bytes": LIMIT}) as service:
        bomb = gzip.compress(b" " * (50 * 1024 * 1024))
        assert len(bomb) < LIMIT
        response = await post(service, bomb, "gzip")
        assert code_of(response) == (413, "request_too_large")
        assert "decompressed" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"{}", gzip.compress(b"{}", mtime=0)[:-3], gzip.compress(b"{}", mtime=0) + b"x", b"\x1f\x8b",
     2 * gzip.compress(b"{}", mtime=0)],
)  # fmt: skip
async def test_what_is_no_gzip_is_explained(service: Service, body: bytes) -> None:
    assert code_of(await post(service, body, "gzip")) == (400, "malformed_body")


def test_the_limit_is_exact() -> None:
    packed = gzip.compress(b"a" * 100)
    assert decompress(packed, 100) == b"a" * 100
    with pytest.raises(RequestTooLargeError):
        decompress(packed, 99)


async def test_an_upstream_gets_the_plain_body() -> None:
    async with relaying() as relay:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        packed = gzip.compress(json.dumps(body).encode())
        for path in ("/chat/completions", "/embeddings"):
            answer = await relay.post(path, packed, content_encoding="gzip")
            assert answer.status == 200, answer.body
            call = relay.fake.received[-1]
            assert json.loads(call.body) == body
            assert call.headers.get("content-encoding") is None
