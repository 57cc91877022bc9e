"""The benchmark of servers: what it sends and counts, and that its table says ahead or behind."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from harness.processes import GatewayProcess, run_cli
from harness.scripted_upstream import ScriptedUpstream
from parrot_bench.load import LoadPlan, LoadResult, drive


async def load(*models: str, first_text: str = "", usage: bool = True) -> LoadResult:
    more = {"stream_options": {"include_usage": True}} if usage else {}
    bodies = [
        msgspec.json.encode({"model": model, "stream": True, "messages": [], **more}).decode()
        for model in models
    ]
    with ScriptedUpstream() as fake:
        plan = LoadPlan(
            url=fake.base_url, body="", bodies=bodies, first_text=first_text, concurrency=2
        )
        result = await drive(plan)
        assert sorted(msgspec.json.decode(each.body)["model"] for each in fake.received) == sorted(
            models
        )
        return result


async def test_each_body_is_sent_once_and_its_tokens_counted() -> None:
    result = await load("fake:chunks=7,key=a", "fake:chunks=3,key=b", "fake:chunks=3,key=c")
    assert (result.requests, result.errors) == (3, 0)
    assert result.tokens > 0


async def test_the_role_alone_is_no_first_token() -> None:
    models = ("fake:chunks=4,delay_ms=20",)
    any_event = await load(*models)
    text = await load(*models, first_text='"no such text"')
    assert any_event.ttft_ms.p50 < any_event.latency_ms.p50
    assert text.ttft_ms.p50 == text.latency_ms.p50
    assert text.gap_ms.max == 0


async def test_a_stream_without_usage_is_an_error() -> None:
    result = await load("fake:chunks=2", usage=False)
    assert (result.errors, result.first_error) == (1, "no usage")


def test_the_command(tmp_path: Path) -> None:
    """Beside another gateway, which stands for any other server."""
    path = tmp_path / "serving.json"
    with GatewayProcess() as peer:
        run = run_cli(
            *("bench", "serving", "--quick", "--long", "100", "--app", "map-reduce"),
            *("--scale", "0.02", "--count", "2"),
            *("--peer-url", f"other={peer.base_url}", "--peers", "vllm", "--json", str(path)),
            deadline_s=120.0,
        )
    assert run.returncode == 0, run.stderr
    assert "torch " in run.stdout
    assert "vllm all: skipped: vLLM " in run.stdout.replace("\n", " ")
    cases = msgspec.json.decode(path.read_bytes())["cases"]
    found = {
        server: {
            (case["case"], name)
            for case in cases
            if case["engine"] == server and "figures" in case
            for name in case["figures"]
        }
        for server in ("gateway", "other", "vllm")
    }
    assert found["vllm"] == set()
    figures = found["gateway"]
    assert {case for case, _ in figures} == {
        "chats-1", "chats-4", "drawn-4", "schema-4", "long", "map-reduce", "front process",
    }  # fmt: skip
    assert ("chats-4", "first_token_p99") in figures
    # The processes' own figures are known of those only that were started here.
    own = {name for name in figures if "front process" in name or "front_process" in name}
    assert found["other"] == figures - own
    for line in run.stdout.splitlines():
        if line.startswith(("chats", "drawn", "schema", "long", "map")) and "front" not in line:
            assert "ahead" in line or "behind" in line


@pytest.mark.parametrize(
    ("option", "value"),
    [("--peers", "sglang"), ("--app", "chains"), ("--streams", "a"), ("--peer-url", "nowhere")],
)
def test_what_the_command_refuses(option: str, value: str) -> None:
    run = run_cli("bench", "serving", option, value)
    assert run.returncode == 2
    assert option in run.stderr
