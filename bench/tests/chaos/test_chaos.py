"""`bench chaos`, small: real gateways, real engines, real faults."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from parrot_bench import report
from parrot_bench.chaos.command import Options, Outcome, PhaseOutcome, chaos_command, run, show
from parrot_bench.chaos.link_proxy import LinkProxy
from typer import Typer
from typer.testing import CliRunner

SMALL = Options(
    fault="kill", upstreams=False, engines=2, streams=9, tokens=48, seconds=6.0, calm_s=1.0,
    every=2.0, at_once=1, stop_s=2.0, graphs=False,
)  # fmt: skip


def phase(name: str = "before", **figures: int) -> PhaseOutcome:
    """A phase in which nothing was lost."""
    fields = dict.fromkeys(PhaseOutcome.__dataclass_fields__, 0)
    del fields["reasons"]
    return PhaseOutcome(**{**fields, "name": name, **figures})  # type: ignore[arg-type]


@pytest.mark.parametrize("figure", ["failed", "protocol", "violations", "usage", "graphs_failed"])
def test_whatever_a_fault_costs_counts_as_lost(figure: str) -> None:
    assert Outcome([phase(), phase("kill", faults=3)], 3, 0, 0).lost == 0
    assert Outcome([phase(), phase("kill", faults=3, **{figure: 2})], 3, 0, 0).lost == 2
    assert Outcome([phase()], 0, 1, 4).lost == 5


def test_differences_count_where_arithmetic_is_exact() -> None:
    struck = phase("kill", faults=3, different=1, graphs_different=1)
    assert Outcome([phase(), struck], 3, 0, 0).lost == 2
    assert Outcome([phase(different=1), struck], 3, 0, 0).lost == 0
    assert Outcome([phase(), struck], 3, 0, 0, compares=False).lost == 0


async def test_a_cut_link_breaks_at_both_ends() -> None:
    broken = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(100):
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()
            broken.set()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(20), LinkProxy(f"http://127.0.0.1:{port}/v1") as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        proxy.cut()
        await broken.wait()
        with suppress(ConnectionError):
            assert await reader.read(1) == b""
        writer.close()
        assert proxy.connections == 1
    server.close()


def test_refused_options() -> None:
    app = Typer()
    app.command()(chaos_command)
    for arguments in (["--fault", "flood"], ["--fault", "cut", "--upstreams"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "--fault" in result.output


@pytest.mark.timeout(300)
def test_engines_are_killed_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(SMALL)
    reference, before, struck, after = outcome.phases
    assert reference.calls == SMALL.streams
    assert struck.faults >= 1
    assert outcome.restarts >= 1
    assert (before.faults, after.faults) == (0, 0)
    for each in outcome.phases:
        assert (each.calls > 0, each.lost, each.different) == (True, 0, 0), each.reasons
    assert (outcome.absent, outcome.left_behind) == (0, 0)
    show(SMALL, outcome)
    shown = capsys.readouterr().out
    assert "failed calls" in shown
    assert "Nothing was lost." in shown
    path = tmp_path / "chaos.json"
    report.write_json(path, "chaos", msgspec.to_builtins(outcome))
    assert len(msgspec.json.decode(path.read_bytes())["phases"]) == 4
