"""The benchmark of servers: what it sends and counts, and that its table says ahead or behind."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from harness.fake_upstream import FakeUpstream
from harness.processes import GatewayProcess, run_cli
from parrot_bench.load import LoadPlan, LoadResult, drive
from parrot_bench.serving import Figures, rows


async def load(*models: str, first_text: str = "", usage: bool = True) -> LoadResult:
    fake = FakeUpstream()
    await fake.start()
    more = {"stream_options": {"include_usage": True}} if usage else {}
    bodies = [
        msgspec.json.encode({"model": model, "stream": True, "messages": [], **more}).decode()
        for model in models
    ]
    try:
        plan = LoadPlan(url=fake.url, body="", bodies=bodies, first_text=first_text, concurrency=2)
        result = await drive(plan)
        assert sorted(msgspec.json.decode(each.body)["model"] for each in fake.log) == sorted(
            models
        )
        return result
    finally:
        await fake.close()


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


def test_ahead_or_behind() -> None:
    ours, theirs = Figures(), Figures()
    ours.add("chats-1", "ms", first=10.0, second=10.0)
    ours.add("chats-1", "ms", first=12.0, second=10.0)
    ours.add("chats-1", "tok/s", output=300.0)
    ours.add("chats-1", "tok/s", alone=1.0)
    theirs.add("chats-1", "ms", first=22.0, second=5.0)
    theirs.add("chats-1", "tok/s", output=200.0)
    table = {line[1]: line[3:] for line in rows({"gateway": ours, "peer": theirs, "none": "why"})}
    assert table["first"] == ["11", "18%", "22", "ahead 2.00x", "-", "-"]
    assert table["second"][2:4] == ["5", "behind 0.50x"]
    assert table["output"][2:4] == ["200", "ahead 1.50x"]
    assert table["alone"][2:] == ["-", "-", "-", "-"]


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
    assert "vllm: vLLM " in run.stdout.replace("\n", " ")
    servers = msgspec.json.decode(path.read_bytes())["servers"]
    assert isinstance(servers["vllm"], str)
    figures = servers["gateway"]
    cases = {name.split()[0] for name in figures}
    assert cases == {"chats-1", "chats-4", "drawn-4", "schema-4", "long", "map-reduce", "front"}
    assert figures["chats-4 first_token_p99"][0] == "ms"
    # The processes' own figures are known of those only that were started here.
    own = {name for name in figures if name.startswith("front") or "front_process" in name}
    assert servers["other"].keys() == figures.keys() - own
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
