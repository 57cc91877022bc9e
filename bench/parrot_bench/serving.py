"""`parrot-gateway bench serving`: streams and applications on own models, beside other servers.

Servers run one after the other on the same machine, each with the same prompts: a closed loop of
streams, chats under a JSON schema beside chats without, one long prompt, and the applications of
the paper, there as an ordinary client runs them. Every figure says whether the gateway is ahead.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parrot_bench.apps import book
from parrot_bench.apps.recipes import BY_WAY, MANY
from parrot_bench.apps.workload import SEMANTIC, Size, Way
from parrot_bench.engine.report import CaseResult, Figure, Unit, table
from parrot_bench.machine import versions_of
from parrot_bench.report import ENGINE_PACKAGES, JsonFile, run_with_progress, write_json
from parrot_bench.servers import BenchmarkError, Server, start_gateway, start_vllm
from parrot_gateway.settings import DEMO_MODEL

if TYPE_CHECKING:
    from parrot_bench.apps.runner import GatewayClient
    from parrot_bench.load import LoadResult

#: Applications by the names of the command line.
RECIPES = {**MANY, **BY_WAY}
#: Seconds for a server to load a model, and for one load.
_START_TIMEOUT_S = 900.0
_LOAD_TIMEOUT_S = 600.0
#: The first delta that is not the role alone.
_FIRST_TEXT = r'"content":\s*"[^"]'
#: Strings of limited length are what masks take longest for.
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 3,
            "maxItems": 6,
        },
        "score": {"type": "integer"},
        "kind": {"enum": ["a", "b", "c"]},
        "text": {"type": "string", "maxLength": 300},
    },
    "required": ["title", "tags", "score", "kind", "text"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The loads and applications to measure."""

    model: str
    streams: Sequence[int]
    prompt_tokens: int
    tokens: int
    rounds: int
    #: Streams under a schema, and of the same chats without; 0: none.
    schema_streams: int
    #: Tokens of a single prompt; 0: none.
    long_tokens: int
    apps: Sequence[str] = ()
    scale: float | None = None
    count: int | None = None
    #: Requests of each stream of a load.
    per_stream: int = 3


class Runs(dict[tuple[str, str, Unit], list[float]]):
    """The runs of one server, by case, figure and unit, in the order of their measurement."""

    def add(self, case: str, unit: Unit, **values: float) -> None:
        for name, value in values.items():
            self.setdefault((case, name, unit), []).append(value)

    def results(self, server: str) -> list[CaseResult]:
        return [
            CaseResult(case, server, figures=(Figure(name, unit, tuple(runs)),))
            for (case, name, unit), runs in self.items()
        ]


@dataclass(frozen=True, slots=True)
class _Load:
    case: str
    streams: int
    bodies: list[str]


def _loads(plan: Plan, model: str, number: int, characters_per_token: float) -> Iterator[_Load]:
    """The loads of a round; prompts are no other's beginning."""

    def load(case: str, streams: int, prompt: int, tokens: int, **more: Any) -> _Load:
        count = plan.per_stream * streams if prompt == plan.prompt_tokens else streams
        characters = max(20, round(prompt * characters_per_token))
        bodies = []
        for each in range(count):
            begin = f"{case} {number:03d} {each:05d}. "
            text = begin + book.passage(max(20, characters - len(begin)), 700 * each)
            body = {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                **more,
            }
            bodies.append(json.dumps(body))
        return _Load(case, streams, bodies)

    for streams in plan.streams:
        greedy = {"temperature": 0, "ignore_eos": True}
        yield load(f"chats-{streams}", streams, plan.prompt_tokens, plan.tokens, **greedy)
    if plan.schema_streams:
        size = (plan.schema_streams, plan.prompt_tokens, plan.tokens)
        yield load(f"drawn-{plan.schema_streams}", *size, temperature=0.8, ignore_eos=True)
        form = {"name": "entry", "strict": True, "schema": SCHEMA}
        answer = {"type": "json_schema", "json_schema": form}
        yield load(f"schema-{plan.schema_streams}", *size, temperature=0.8, response_format=answer)
    if plan.long_tokens:
        yield load("long", 1, plan.long_tokens, plan.tokens, temperature=0, ignore_eos=True)


async def measure(
    url: str, plan: Plan, way: Way, progress: Callable[[str], None], server: Server | None = None
) -> Runs:
    """Measure everything on one server that is ready.

    Args:
        url: ending in `/v1`.
        plan: what to measure.
        way: in which applications are run.
        progress: called with what is being measured.
        server: its process, where it was started here.

    Raises:
        BenchmarkError: a request failed.
    """
    from parrot_bench.apps.measure import characters_per_token
    from parrot_bench.apps.runner import GatewayClient
    from parrot_bench.load import LoadPlan, run_load

    runs = Runs()
    model = await asyncio.to_thread(_model_of, url)
    async with GatewayClient(url, model) as client:
        density = await characters_per_token(client)
        # Round 0 is not measured: kernels, graphs and connections of every size.
        for number in range(plan.rounds + 1):
            for load in _loads(plan, model, number, density):
                progress(f"{load.case}, round {number} of {plan.rounds}")
                before = server.cpu_s() if server is not None else 0.0
                result = await run_load(
                    LoadPlan(
                        url=url,
                        body="",
                        bodies=load.bodies,
                        first_text=_FIRST_TEXT,
                        concurrency=load.streams,
                        timeout_s=_LOAD_TIMEOUT_S,
                    )
                )
                if result.errors:
                    raise BenchmarkError(f"{load.case}: {result.first_error}")
                if number:
                    _add(runs, load.case, result)
                    if server is not None and load.case == f"chats-{load.streams}":
                        core = (server.cpu_s() - before) / result.seconds
                        runs.add(load.case, "cores", front_process=core)
        for app in plan.apps:
            await _run_app(runs, client, plan, app, way, density, progress)
    if server is not None:
        runs.add("front process", "MB", memory=server.rss_mb())
        runs.add("front process", "s", ready_after=server.start_s)
    return runs


def _add(runs: Runs, case: str, result: LoadResult) -> None:
    first, between = result.ttft_ms, result.gap_ms
    runs.add(case, "ms", first_token_p50=first.p50, first_token_p99=first.p99)
    runs.add(case, "ms", between_p50=between.p50, between_p99=between.p99)
    runs.add(case, "ms", token_p50=result.token_ms.p50)
    if case != "long":
        runs.add(case, "tok/s", output=result.tokens / result.seconds)


async def _run_app(
    runs: Runs,
    client: GatewayClient,
    plan: Plan,
    app: str,
    way: Way,
    density: float,
    progress: Callable[[str], None],
) -> None:
    from parrot_bench.apps.measure import Summary, salt, samples_by_kind
    from parrot_bench.apps.runner import run_workload

    recipe = RECIPES[app]
    size = Size(plan.count or recipe.count, plan.scale or recipe.scale, density)
    for number in range(plan.rounds + 1):
        progress(f"{app}, round {number} of {plan.rounds}")
        workload, session = recipe.build(size, salt()), f"bench-{secrets.token_hex(8)}"
        result = await run_workload(client, workload, way, session)
        if way == SEMANTIC:
            await client.forget(session)
        if number:
            for kind, rounds in samples_by_kind(workload, [result]).items():
                found = Summary.of(workload, kind, rounds)
                unit: Unit = "ms/token" if kind in workload.per_token else "s"
                name = kind if kind == app else f"{app}, {kind}"
                runs.add(name, unit, p50=found.p50)
                if len(rounds[0]) > 1:
                    runs.add(name, unit, p99=found.p99)


def _model_of(url: str) -> str:
    """The name of the first model of a server."""
    from urllib.request import urlopen

    try:
        with urlopen(f"{url}/models", timeout=60) as answer:
            name: str = json.load(answer)["data"][0]["id"]
    except (OSError, ValueError, LookupError) as error:
        raise BenchmarkError(f"{url}/models: {error}") from None
    return name


@asynccontextmanager
async def _started(server: Server) -> AsyncIterator[Server]:
    try:
        yield server
    finally:
        await server.stop()


async def compare(
    plan: Plan,
    config: Path | None,
    peers: Sequence[str],
    urls: dict[str, str],
    arguments: Sequence[str],
    progress: Callable[[str], None],
) -> list[CaseResult]:
    """The figures of all servers, or why there are none; those of the gateway come first.

    Args:
        plan: what to measure.
        config: of the gateway, in place of the plan's model.
        peers: servers to start once the gateway has ended.
        urls: by name base URLs of servers that run already.
        arguments: more options of the peers that are started.
        progress: called with what is being measured.

    Raises:
        BenchmarkError: the gateway did not start, or a request to it failed.
    """
    source = ["--model", plan.model] if config is None else ["--config", str(config)]
    progress("starting the gateway")
    gateway = await start_gateway(*source, timeout_s=_START_TIMEOUT_S)
    async with _started(gateway):
        found = (await measure(gateway.url, plan, SEMANTIC, progress, gateway)).results("gateway")
    for name in (*urls, *peers):
        progress(f"starting {name}")
        try:
            if name in urls:
                runs = await measure(urls[name], plan, "parallel", progress)
            else:
                async with _started(
                    await start_vllm(plan.model, arguments, _START_TIMEOUT_S)
                ) as peer:
                    runs = await measure(peer.url, plan, "parallel", progress, peer)
            found += runs.results(name)
        except BenchmarkError as error:
            found.append(CaseResult("all", name, skipped=str(error)))
    return found


def show(plan: Plan, results: Sequence[CaseResult]) -> None:
    versions = versions_of(ENGINE_PACKAGES)
    for line in (
        f"{plan.model}: chats of {plan.prompt_tokens} tokens, {plan.tokens} out",
        table(results),
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Medians of the rounds; between: gaps between events of a stream, token: a request's time "
        "behind its first token by each other one. Applications: on the gateway with semantic "
        "variables, elsewhere by a client that sends each call as soon as it has what that reads.",
    ):
        typer.echo(line)


def serving_command(
    model: Annotated[str, typer.Option(help="A folder or hub id.")] = DEMO_MODEL,
    config: Annotated[
        Path | None, typer.Option(help="Settings of the gateway, its model included.")
    ] = None,
    streams: Annotated[str, typer.Option(metavar="N,N,…", help="Streams at once.")] = "1,8,64,256",
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Of each chat, about.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 128,
    schema: Annotated[
        int, typer.Option(min=0, metavar="STREAMS", help="Chats under a JSON schema; 0: none.")
    ] = 64,
    long: Annotated[
        int, typer.Option(min=0, metavar="TOKENS", help="Of one long prompt; 0: none.")
    ] = 0,
    app: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Applications: {', '.join(RECIPES)}; repeatable."),
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Multiplies the paper's lengths.")] = None,
    count: Annotated[int | None, typer.Option(help="Steps, chunks, branches or chats.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Small loads, to try it out.")] = False,
    peers: Annotated[
        str, typer.Option(metavar="NAME,…", help="Servers to start and measure next: vllm.")
    ] = "",
    peer_arguments: Annotated[str, typer.Option(help="More options of these servers.")] = "",
    peer_url: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="A server that runs already, ending in /v1."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure streams and applications through this server and, in the same run, through others."""
    names = [name for name in peers.split(",") if name]
    urls = dict(each.split("=", 1) for each in peer_url or [] if "=" in each)
    for option, given, known in (
        ("--peers", names, ("vllm",)),
        ("--app", app or (), tuple(RECIPES)),
        ("--peer-url", [each for each in peer_url or [] if "=" not in each], ("NAME=URL",)),
    ):
        for each in given:
            if each not in known:
                message = f"'{each}' is none of {', '.join(known)}"
                raise typer.BadParameter(message, param_hint=option)
    try:
        at_once = [int(each) for each in streams.split(",") if each]
    except ValueError:
        raise typer.BadParameter("numbers with commas", param_hint="--streams") from None
    plan = Plan(
        model, at_once, prompt_tokens, tokens, rounds, schema, long, tuple(app or ()), scale, count
    )
    if quick:
        plan = replace(
            plan, streams=[1, 4], prompt_tokens=64, tokens=16, rounds=1, per_stream=2,
            schema_streams=min(schema, 4), long_tokens=min(long, 512), scale=scale or 0.05,
            count=count or 3,
        )  # fmt: skip
    results = run_with_progress(
        lambda progress: asyncio.run(
            compare(plan, config, names, urls, shlex.split(peer_arguments), progress)
        )
    )
    show(plan, results)
    if json_file is not None:
        plain = [result.to_dict() for result in results]
        write_json(json_file, "serving", {"model": model, "cases": plain})
