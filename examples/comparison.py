"""The command line of the examples, and the table at the end.

An example is one application in several ways: call by call first, then with its graph declared to
the gateway. Alone, an example runs the last way. With `--compare` it runs all of them in turn,
round by round, over the same simulated network (`network.py`), which delays each direction by half
of `--latency-ms`. Tokens are those that the gateway's own engines counted.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

# Not used here: models load it on first use, and no run's time includes that.
import openai  # noqa: F401
from network import Network
from parrot_client.connection import NO_KEY, default_api_key, default_base_url

# The text belongs to the benches, which need not be installed for the examples.
sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from parrot_bench.apps import book

__all__ = ["Result", "Setting", "book", "main"]

API_KEY = default_api_key() or NO_KEY
#: With `--compare`, and without.
LATENCIES_MS = (100.0, 0.0)
#: Engines report their counters with their heartbeats; this is the longest wait, in seconds.
COUNTERS_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Setting:
    """The arguments of one run of an application.

    Attributes:
        base_url: of the gateway, through the simulated network.
        model: its name.
        api_key: for clients that insist on one.
        salt: begins the prompts of a run, so that no run finds another one's prompts in a cache;
            all salts have the same length.
        quick: as small as makes sense.
        another_client: the address for one more client, whose round trips are counted apart and
            added: for applications of several users.
    """

    base_url: str
    model: str
    api_key: str
    salt: str
    quick: bool
    another_client: Callable[[], str]

    @property
    def session(self) -> str:
        """The name of the run's session: the example, and letters of the salt."""
        return f"{Path(sys.argv[0]).stem} {self.salt[:7].replace(' ', '')}"


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Attributes:
        texts: that the application is for.
        calls: of the model.
        times: further durations to show, in seconds, by what they are of.
    """

    texts: Sequence[str]
    calls: int
    times: Mapping[str, float] = field(default_factory=dict)


Application = Callable[[Setting], Result]


@dataclass(frozen=True)
class Row:
    """One run in figures; tokens are None where the gateway has no engines of its own."""

    calls: int
    round_trips: int
    seconds: float
    computed: int | None
    reused: int | None
    output: int | None
    times: Mapping[str, float]
    #: Calls that the gateway took besides.
    others: int


def _counters(base_url: str) -> Counter[str]:
    """Counters of a gateway since its start; waits for the next heartbeat of each engine.

    Returns:
        `calls`, and the tokens `filled`, `cached` and `generated` if it has engines of its own.
    """
    request = urllib.request.Request(  # noqa: S310 - the user's own address
        base_url.removesuffix("/v1") + "/health", headers={"Authorization": f"Bearer {API_KEY}"}
    )
    began = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(request, timeout=COUNTERS_TIMEOUT_S) as answer:  # noqa: S310
                health: dict[str, Any] = json.load(answer)
        except ValueError:
            health = {}
        if "scheduler" not in health:
            sys.exit(
                f"{base_url}: this is no Parrot Gateway, or it wants another key: set "
                "PARROT_API_KEY to its key."
            )
        waited = time.monotonic() - began
        engines = health.get("engines", [])
        if all(engine["stats_age_s"] < waited for engine in engines):
            counters = Counter(calls=health["scheduler"]["placed"])
            for engine in engines:
                for name in ("filled", "cached", "generated"):
                    counters[name] += engine["stats"][f"{name}_tokens"]
            return counters
        if waited > COUNTERS_TIMEOUT_S:
            sys.exit(f"{base_url}: its engines send no counters.")
        time.sleep(0.1)


def _run(
    application: Application, options: argparse.Namespace, salt: str, latency_ms: float
) -> tuple[Result, Row]:
    with Network(options.base_url, latency_ms / 1000) as network:
        setting = Setting(
            network.client(), options.model, API_KEY, salt, options.quick, network.client
        )
        before = _counters(options.base_url)
        began = time.perf_counter()
        result = application(setting)
        seconds = time.perf_counter() - began
        done = _counters(options.base_url)
    has_engines = "filled" in done
    done.subtract(before)
    return result, Row(
        calls=result.calls,
        round_trips=network.round_trips,
        seconds=seconds,
        computed=done["filled"] - done["cached"] if has_engines else None,
        reused=done["cached"] if has_engines else None,
        output=done["generated"] if has_engines else None,
        times=result.times,
        others=done["calls"] - result.calls,
    )


def _middle(rows: Sequence[Row]) -> Row:
    """The median of each figure."""

    def of(values: Sequence[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return round(median(known)) if known else None

    return Row(
        calls=rows[0].calls,
        round_trips=round(median(row.round_trips for row in rows)),
        seconds=median(row.seconds for row in rows),
        computed=of([row.computed for row in rows]),
        reused=of([row.reused for row in rows]),
        output=of([row.output for row in rows]),
        times={name: median(row.times[name] for row in rows) for name in rows[0].times},
        others=max(row.others for row in rows),
    )


def _print_table(rows: Mapping[str, Row]) -> None:
    times = list(next(iter(rows.values())).times)
    head = "way, calls, round trips, seconds, prompt tokens computed, reused, output tokens"
    table = [[*head.split(", "), *(f"{name}, s" for name in times)]]
    for way, row in rows.items():
        counts = ("–" if n is None else f"{n:,}" for n in (row.computed, row.reused, row.output))
        cells = [way, f"{row.calls}", f"{row.round_trips}", f"{row.seconds:.2f}", *counts]
        table.append(cells + [f"{row.times[name]:.2f}" for name in times])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        name, *numbers = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([name.strip().ljust(widths[0]), *numbers]))
    others = max(row.others for row in rows.values())
    if others > 0:
        print(f"NOTE: the gateway took up to {others} other calls meanwhile; tokens are of all.")


def _compare(ways: Mapping[str, Application], options: argparse.Namespace, latency: float) -> None:
    texts = {}
    # Not timed; with one salt for all, so that the texts must be the same.
    salt = _salt()
    for way, application in ways.items():
        texts[way] = list(_run(application, options, salt, 0.0)[0].texts)
    runs: dict[str, list[Row]] = {way: [] for way in ways}
    for number in range(options.rounds):
        # Who was first in one round is last in the next.
        for way in list(ways)[:: 1 if number % 2 == 0 else -1]:
            runs[way].append(_run(ways[way], options, _salt(), latency)[1])
    print(
        f"{latency:g} ms of network, medians of {options.rounds} rounds, "
        f"{'the same texts' if len(set(map(str, texts.values()))) == 1 else 'NOT the same texts'} "
        "in all ways"
    )
    rows = {way: _middle(measured) for way, measured in runs.items()}
    _print_table(rows)
    (base, plain), *others = rows.items()
    for way, row in others:
        # Runs of one round are compared with each other: other load on the machine affects both.
        pairs = zip(runs[base], runs[way], strict=True)
        faster = median(before.seconds / after.seconds for before, after in pairs)
        shares = [f"{faster:.2f}x as fast"]
        if plain.round_trips != row.round_trips:
            shares.append(f"{row.round_trips} instead of {plain.round_trips} round trips")
        for name, seconds in row.times.items():
            shares.append(f"{name} {plain.times[name] / seconds:.2f}x as fast")
        print(f"{way} against {base}: {', '.join(shares)}")


def _salt() -> str:
    """Sixteen words of one token each in most vocabularies, so that all salts are as long."""
    return "".join(secrets.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") + " " for _ in range(16)).strip()


def main(description: str | None, ways: Mapping[str, Application]) -> None:
    """The command line of an example.

    Args:
        description: its documentation, for `--help`.
        ways: of running the application, by name: call by call first, then with its graph.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base-url", default=default_base_url(), help="of the gateway (%(default)s)"
    )
    parser.add_argument("--model", default="parrot-demo", help="(%(default)s)")
    parser.add_argument("--compare", action="store_true", help="run all ways: " + ", ".join(ways))
    parser.add_argument(
        "--latency-ms",
        type=float,
        help="of the simulated network ({:g} with --compare, else {:g})".format(*LATENCIES_MS),
    )
    parser.add_argument("--rounds", type=int, default=2, help="with --compare (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="the smallest size")
    options = parser.parse_args()
    options.base_url = options.base_url.rstrip("/")
    latency = options.latency_ms
    if latency is None:
        latency = LATENCIES_MS[0 if options.compare else 1]
    try:
        if options.compare:
            _compare(ways, options, latency)
            return
        way = list(ways)[-1]
        result, row = _run(ways[way], options, _salt(), latency)
    except OSError as error:
        sys.exit(f"{options.base_url} does not answer ({error}): is it running? `make serve`")
    for text in result.texts:
        shown = " ".join(text.split())
        print(f"- {shown[:300]}{'…' if len(shown) > 300 else ''}")
    print()
    _print_table({way: row})
