"""No table loses a name or a figure, in a pipe or on a narrow terminal."""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from parrot_bench import serving
from parrot_bench.apps.gain import GainOutcome
from parrot_bench.apps.measure import AppOutcome
from parrot_bench.apps.policies import PoliciesOutcome
from parrot_bench.apps.tables import show_gain, show_policies, show_ways
from parrot_bench.report import Row, show
from typer.testing import CliRunner

from parrot_gateway.cli.main import app

_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def example(kind: Any) -> Any:
    """A value of a type, its figures long."""
    if typing.get_origin(kind) is list:
        return [example(typing.get_args(kind)[0])] * 2
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in msgspec.structs.fields(kind)]
        return kind(**{name: example(hints[name]) for name in names})
    plain: dict[Any, Any] = {
        str: "map-reduce", int: 123_456, float: 123.4567, bool: True, float | None: 7.5
    }  # fmt: skip
    return plain.get(kind, {})


def overhead() -> None:
    peers = {"bare": 345678.0, "LiteLLM": 456789.0}
    rows = [
        Row("32 calls, of the gateway itself", "calls/s", 123456.0, 234567.0, peers, at_least=1.0),
        Row("16 streams", "ms", 3.1, direct=2.2, at_most=1.0, aims_at_added=True),
    ]
    show("bench overhead on a machine with a name", rows, ["a note"])


def served() -> None:
    ours, theirs = serving.Figures(), serving.Figures()
    for figures in (ours, theirs):
        figures.add("64 streams", "tokens/s", throughput=12345.6)
        figures.add("one long prompt", "ms", first=1234.5)
    plan = serving.Plan("parrot-demo", [64], 512, 128, 1, 0, 0, (), None, None, 0.0)
    serving.show(plan, {"gateway": ours, "vllm": theirs, "other": "did not start"})


@pytest.fixture(autouse=True)
def _fixed_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are printed twice and compared: what they say of the machine stays the same."""
    monkeypatch.setattr(os, "getloadavg", lambda: (14.02, 7.5, 3.25))


def words(text: str) -> set[str]:
    """Without frames, which are as wide as the table."""
    return {word for word in text.split() if any(map(str.isalnum, word))}


def widest(text: str) -> int:
    return max(len(line.rstrip()) for line in text.splitlines())


TABLES: dict[str, Callable[[], None]] = {
    "overhead": overhead,
    "serving": served,
    "ways": lambda: show_ways([msgspec.structs.replace(example(AppOutcome), app="map-reduce")]),
    "policies": lambda: show_policies([example(PoliciesOutcome)]),
    "gain": lambda: show_gain([example(GainOutcome)]),
}
#: Commands that measure: their figures differ from run to run.
COMMANDS = (
    "bench scheduler --engines 2,3 --queued 5 --decisions 5",
    "bench linking --workload map_reduce --instances 2 --no-cost --linker naive",
)


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("table", TABLES)
def test_nothing_is_cut(
    table: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(width: int, on_terminal: bool) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TTY_COMPATIBLE", str(int(on_terminal)))
        TABLES[table]()
        return _STYLE.sub("", capsys.readouterr().out)

    wide = shown(500, on_terminal=True)
    assert "…" not in wide
    for on_terminal in (True, False):
        assert words(shown(columns, on_terminal)) >= words(wide)
    assert widest(shown(columns, on_terminal=True)) <= columns


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_fit_a_narrow_terminal(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    result = CliRunner().invoke(app, line.split(), catch_exceptions=False)
    assert result.exit_code == 0
    text = _STYLE.sub("", result.stdout)
    assert "…" not in text
    assert widest(text) <= 60
