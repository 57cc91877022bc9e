"""The linker skips and counts calls that it cannot take; they are answered as ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.processes import API_KEY, GatewayProcess, upstream_settings, wait_until
from harness.scripted_upstream import ScriptedUpstream, chat_document, document

STORY = (
    "The heron waited in the reeds until the fox came down to drink, and neither of them spoke "
    "of the duck that both had seen an hour before on the far side of the pond."
)


@pytest.fixture(scope="module")
def gateway(upstream: ScriptedUpstream) -> Iterator[GatewayProcess]:
    with GatewayProcess(
        config={
            "upstreams": [upstream_settings("scripted", upstream.base_url)],
            "linking": {"max_body_bytes": 2_000_000},
        },
        api_key=API_KEY,
        environment={"SOME_API_KEY": "not for strangers", "AWS_SECRET": "neither"},
    ) as process:
        yield process


def linking(gateway: GatewayProcess) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    found = httpx.get(f"{gateway.root}/health", headers=headers, timeout=60).json()["linking"]
    return dict(found)


def call(gateway: GatewayProcess, body: bytes) -> httpx.Response:
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    url = f"{gateway.base_url}/chat/completions"
    return httpx.post(url, content=body, headers=headers, timeout=60)


def chat(model: str, text: str) -> bytes:
    messages = [{"role": "user", "content": text}]
    return httpx.Request("POST", "http://x", json={"model": model, "messages": messages}).content


def known(gateway: GatewayProcess, response: httpx.Response) -> dict[str, Any] | None:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    url = f"{gateway.base_url}/calls/{response.headers['x-request-id']}"
    found = httpx.get(url, headers=headers, timeout=60)
    return dict(found.json()) if found.status_code == 200 else None


def test_a_flood_is_skipped_and_delays_nothing(
    gateway: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    texts = [f"{number} {'a long prompt ' * 100_000}" for number in range(12)]
    model = upstream.script(
        *[document(chat_document("Fine.")) for _ in texts],
        document(chat_document(STORY)),
        document(chat_document("Fine.")),
    )
    before = linking(gateway)
    pid = before["pid"]
    # The process takes nothing for a while.
    os.kill(pid, signal.SIGSTOP)
    try:
        for text in texts:
            assert call(gateway, chat(model, text)).status_code == 200
        during = linking(gateway)
        assert during["skipped"] >= before["skipped"] + 3
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: linking(gateway).get("waiting_bytes") == 0, "what waits to be worked off")
    first = call(gateway, chat(model, "A story, please."))
    second = call(gateway, chat(model, f"Translate:\n\n{STORY}"))
    found = known(gateway, first)
    assert found is not None
    assert found["state"] == "done"
    later = known(gateway, second)
    assert later is not None
    assert [link["from"] for link in later["links"]] == [found["id"]]
    after = linking(gateway)
    assert after["pid"] == pid
    assert after["skipped"] >= during["skipped"]
    assert after["behind_s"] == 0
    assert 0 < after["largest_tenant_bytes"] <= after["bytes"]


@pytest.mark.parametrize(
    "body",
    [
        os.urandom(100_000),
        b"[" * 1_000_000,
        b'{"model": "none", "messages": [{"role": "user", "content": "' + b"\xff\xfe" * 50_000,
        b'{"model": "none", "messages": ' + b'[{"role": "user", "content": "x"},' * 20_000 + b"0]}",
        b'{"model": "none", "messages": "' + b"\\u0000\\ud800" * 50_000 + b'"}',
        b'{"model": "none", "prompt": "' + b"x" * 3_000_000 + b'"}',
    ],
    ids=["random", "deep", "no_utf8", "many_messages", "escapes", "too_long"],
)
def test_garbage_ends_nothing(
    gateway: GatewayProcess, upstream: ScriptedUpstream, body: bytes
) -> None:
    before = linking(gateway)
    for _ in range(3):
        assert call(gateway, body).status_code < 500
    model = upstream.script(document(chat_document("Fine.")))
    assert known(gateway, call(gateway, chat(model, "Go on."))) is not None
    after = linking(gateway)
    assert (after["pid"], after["restarts"]) == (before["pid"], 0)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_the_process_gets_no_secrets(gateway: GatewayProcess) -> None:
    environment = Path(f"/proc/{linking(gateway)['pid']}/environ").read_bytes()
    assert b"PATH=" in environment
    for secret in (b"SOME_API_KEY", b"AWS_SECRET", API_KEY.encode()):
        assert secret not in environment
