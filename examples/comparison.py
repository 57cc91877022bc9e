"""What the examples share: their command line, a simulated network, and the table at the end.

An example is one application in several ways: call by call first, then with what tells the gateway
its graph. Alone, an example runs the last way. With `--compare` it runs all of them in turn, round
by round, over the same simulated network: a relay between client and gateway that delays each
direction by half of `--latency-ms`, and counts the client's round trips. Tokens are those that the
gateway's own engines counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from urllib.parse import urlsplit

# Not used here: models load it when they are first used, and no run's time shall have that in it.
import openai  # noqa: F401

from parrot_gateway.bench.apps import book

__all__ = ["Result", "Setting", "book", "main"]

#: An open gateway needs none.
API_KEY = os.environ.get("PARROT_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none"
BASE_URL = (
    os.environ.get("PARROT_BASE_URL")
    or os.environ.get("OPENAI_BASE_URL")
    or "http://127.0.0.1:8000/v1"
)
#: With `--compare`, and without.
LATENCIES_MS = (100.0, 0.0)
#: Counters of engines come with their heartbeats; they are waited for so long.
NEWS_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Setting:
    """What one run of an application gets.

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


@dataclass(frozen=True)
class Result:
    """What a run comes to.

    Attributes:
        texts: what the application is for.
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


class _Client:
    """One client on the simulated network: an address of its own.

    A round trip begins when the client sends something and has got something since it last sent:
    calls that are under way side by side are one, whatever the number of connections.
    """

    def __init__(self, latency_s: float) -> None:
        self.round_trips = 0
        self._delay_s = latency_s / 2
        self._is_sending = False

    async def serve(self, target: str) -> asyncio.Server:
        url = urlsplit(target)
        is_tls = url.scheme == "https"
        port = url.port or (443 if is_tls else 80)

        async def connected(
            client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter
        ) -> None:
            try:
                server_in, server_out = await asyncio.open_connection(
                    url.hostname, port, ssl=True if is_tls else None
                )
            except OSError:
                client_out.close()
                return
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass_on(client_in, server_out, self._sends, None))
                    group.create_task(self._pass_on(server_in, client_out, None, self._gets))
            except* OSError:
                pass  # One side is gone: so is the connection.
            finally:
                client_out.close()
                server_out.close()

        return await asyncio.start_server(connected, "127.0.0.1", 0)

    def _sends(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            self.round_trips += 1

    def _gets(self) -> None:
        self._is_sending = False

    async def _pass_on(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        on_read: Callable[[], None] | None,
        on_write: Callable[[], None] | None,
    ) -> None:
        """Everything, each piece after the delay; pieces travel behind one another."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)

        async def deliver() -> None:
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    target.write_eof()
                    return
                if on_write is not None:
                    on_write()
                target.write(data)
                await target.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            while data := await source.read(65536):
                if on_read is not None:
                    on_read()
                await under_way.put((time.monotonic() + self._delay_s, data))
            await under_way.put((time.monotonic() + self._delay_s, b""))


class Network:
    """The simulated network between clients and a gateway, run by a thread; a context manager.

    Args:
        base_url: of the gateway.
        latency_s: of a round trip. Opening a connection takes no time.
    """

    def __init__(self, base_url: str, latency_s: float) -> None:
        self._base_url = base_url
        self._latency_s = latency_s
        self._clients: list[_Client] = []
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        # Connections that are cut off with the network are nobody's concern.
        self._loop.set_exception_handler(lambda *_: None)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cut(self) -> None:
        for server in self._servers:
            server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def client(self) -> str:
        """The address of the gateway for a client that was not there before."""
        client = _Client(self._latency_s)
        serving = asyncio.run_coroutine_threadsafe(client.serve(self._base_url), self._loop)
        server = serving.result()
        port = server.sockets[0].getsockname()[1]
        self._clients.append(client)
        self._servers.append(server)
        return f"http://127.0.0.1:{port}{urlsplit(self._base_url).path}"

    @property
    def round_trips(self) -> int:
        """Of all clients so far."""
        return sum(client.round_trips for client in self._clients)


@dataclass(frozen=True)
class _Counters:
    """What a gateway has done since it was started."""

    calls: int
    #: Of its own engines, if it has any.
    filled: int
    cached: int
    generated: int
    has_engines: bool


def _counters(base_url: str) -> _Counters:
    """The counters of now: engines tell theirs with the next heartbeat."""
    request = urllib.request.Request(  # noqa: S310 - the user's own address
        base_url.removesuffix("/v1") + "/health",
        headers={"Authorization": f"Bearer {API_KEY}"},
    )
    began = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(request, timeout=NEWS_TIMEOUT_S) as answer:  # noqa: S310
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
            return _Counters(
                health["scheduler"]["placed"],
                sum(engine["stats"]["filled_tokens"] for engine in engines),
                sum(engine["stats"]["cached_tokens"] for engine in engines),
                sum(engine["stats"]["generated_tokens"] for engine in engines),
                bool(engines),
            )
        if waited > NEWS_TIMEOUT_S:
            sys.exit(f"{base_url}: its engines tell nothing of their work.")
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
        after = _counters(options.base_url)
    filled, cached = after.filled - before.filled, after.cached - before.cached
    knows = after.has_engines
    return result, Row(
        calls=result.calls,
        round_trips=network.round_trips,
        seconds=seconds,
        computed=filled - cached if knows else None,
        reused=cached if knows else None,
        output=after.generated - before.generated if knows else None,
        times=result.times,
        others=after.calls - before.calls - result.calls,
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
        # Of the runs of one round with each other: what else the machine did, both have felt.
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
    parser.add_argument("--base-url", default=BASE_URL, help="of the gateway (%(default)s)")
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
