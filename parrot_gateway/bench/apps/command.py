"""`parrot-gateway bench apps`: options, the server, the tables."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from parrot_gateway.bench.apps.applications import RECIPES
from parrot_gateway.bench.apps.workload import SEMANTIC, Size
from parrot_gateway.bench.report import machine, print_table
from parrot_gateway.bench.servers import BenchmarkError, Server
from parrot_gateway.settings.demo_model import DEMO_MODEL

if TYPE_CHECKING:
    from parrot_gateway.bench.apps.measure import AppOutcome, Comparison

#: Applications that compare ways of calling, and those that compare policies of placement.
BY_CLIENT = tuple(name for name, recipe in RECIPES.items() if not recipe.by_policy)
BY_POLICY = tuple(name for name, recipe in RECIPES.items() if recipe.by_policy)
POLICIES = ("parrot", "round-robin", "least-loaded")
ENGINES = 4

DELAYS_MS = (0.0, 50.0, 250.0)
QUICK_DELAYS_MS = (0.0, 250.0)


class Options(msgspec.Struct, frozen=True):
    """What to run, and where."""

    apps: tuple[str, ...] = BY_CLIENT
    #: The application's own when not given.
    scale: float | None = None
    count: int | None = None
    delays_ms: tuple[float, ...] = DELAYS_MS
    rounds: int = 5
    #: A server that runs already; without one a gateway with the demo model is started.
    base_url: str | None = None
    model: str = DEMO_MODEL
    api_key: str | None = None


async def run(
    options: Options, progress: Callable[[str], None] = lambda _: None
) -> list[AppOutcome]:
    """Run the benchmark.

    Args:
        options: what to run.
        progress: is told what is being measured.

    Raises:
        BenchmarkError: the server did not start, or a call failed.
    """
    # The command line must not wait for an HTTP client to be imported.
    from parrot_gateway.bench.apps.measure import characters_per_token, measure
    from parrot_gateway.bench.apps.runner import GatewayClient

    server: Server | None = None
    base_url = options.base_url
    try:
        if base_url is None:
            progress("starting the gateway")
            command = [sys.executable, "-m", "parrot_gateway", "serve", "--port", "0"]
            command += ["--model", options.model]
            server = await Server.start("the gateway", command, r"ready at (http://\S+/v1)")
            base_url = server.url
        async with GatewayClient(base_url, options.model, options.api_key) as client:
            density = await characters_per_token(client)
            outcomes = []
            for app in options.apps:
                recipe = RECIPES[app]
                size = Size(options.count or recipe.count, options.scale or recipe.scale, density)
                outcomes.append(
                    await measure(client, app, size, options.delays_ms, options.rounds, progress)
                )
            return outcomes
    finally:
        if server is not None:
            await server.stop()


def show(outcomes: Sequence[AppOutcome]) -> None:
    """Print a table for each application."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for outcome in outcomes:
        console.print(
            f"[bold]{outcome.app}[/]: {outcome.count} {RECIPES[outcome.app].what}, "
            f"{outcome.calls} calls, {outcome.tokens:,} tokens of output, the paper's lengths x "
            f"{outcome.scale:g}",
            highlight=False,
        )
        table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("network", no_wrap=True)
        table.add_column("client", no_wrap=True)
        for name in ("p50", "p99", "semantic", "p99", "speed-up", "aim", "trips"):
            table.add_column(name, justify="right", no_wrap=True)
        for each in outcome.comparisons:
            table.add_row(*_cells(each))
        print_table(table)
        told = ", ".join(f"{way} {number}" for way, number in outcome.requests.items())
        same = "the same" if outcome.same_texts else "DIFFERENT"
        console.print(
            f"Final texts of all ways: {same}. Requests of a run: {told}.",
            style="dim" if outcome.same_texts else "red",
            highlight=False,
        )
        for difference in outcome.differences:
            console.print(difference, style="red", highlight=False, markup=False)
        console.print()
    console.print(
        "p50 and p99 of the time from a job's start until its client has what it reads (of chats: "
        "per token). One by one: the client sends a call when it has the answer to the last; "
        "parallel: as soon as it has what the call reads; semantic: all at once. Speed-up: median "
        "over the rounds. Trips: round trips one after another, the client's and with semantic "
        "variables.",
        style="dim",
        highlight=False,
    )


def _cells(each: Comparison) -> list[str]:
    colour = {None: "", True: "[green]", False: "[red]"}[each.met]
    goal = "" if each.at_least is None else f"{colour}≥ {each.at_least:g}"
    unit, digits = (" ms", 1) if each.unit == "ms/token" else (" s", 2)
    times = (each.client_p50, each.client_p99, each.semantic_p50, each.semantic_p99)
    return [
        f"{each.delay_ms:g} ms",
        each.client if each.kind == each.app else each.kind,
        *(f"{time:.{digits}f}{unit}" for time in times),
        f"{each.speedup:.2f}x",
        goal,
        f"{each.client_round_trips}→{each.semantic_round_trips}",
    ]


def apps_command(
    app: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(RECIPES)}; repeatable. {' and '.join(BY_POLICY)} compare policies of "
            "placement on several engines, the others ways of calling.",
            show_default=", ".join(BY_CLIENT),
        ),
    ] = None,
    engines: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Compare policies, each with so many engine processes of its own.",
            show_default=f"{ENGINES} for {' and '.join(BY_POLICY)}",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A policy to compare, as `serve --policy` takes it; the first is compared with "
            "each other; repeatable.",
            show_default=", ".join(POLICIES),
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Multiplies the paper's numbers of tokens.",
            show_default="0.25; multi-agent 0.125, gpts 0.2",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps, chunks, branches, chats or calls.",
            show_default="the paper's; 40 calls of gpts",
        ),
    ] = None,
    network_delay: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            metavar="MS",
            help="Simulated round trip between client and gateway; repeatable.",
            show_default="0, 50 and 250",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs each way.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two rounds, without network and at 250 ms.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="A gateway that runs already, ending in /v1; else one is started."),
    ] = None,
    model: Annotated[str, typer.Option(help="Model to call.")] = DEMO_MODEL,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="env:NAME", help="Environment variable with the key of --base-url."),
    ] = None,
) -> None:
    """Run the paper's applications call by call and with semantic variables, and compare.

    Or, on several engines, under different policies of placement.
    """
    from rich.console import Console

    from parrot_gateway.settings.client_key import key_of_option
    from parrot_gateway.settings.config_file import ConfigError

    console = Console(stderr=True)
    apps = tuple(dict.fromkeys(app or BY_CLIENT))
    for name in apps:
        if name not in RECIPES:
            raise typer.BadParameter(
                f"'{name}' is none of {', '.join(RECIPES)}", param_hint="--app"
            )
    by_policy = bool(engines or policy or set(apps) & set(BY_POLICY))
    if by_policy:
        _check_by_policy(apps, policy, network_delay, base_url, set_by_hand=bool(engines or policy))
        _compare_policies(
            apps,
            tuple(dict.fromkeys(policy or POLICIES)),
            engines=engines or ENGINES,
            model=model,
            count=count,
            scale=scale,
            rounds=min(rounds, 2) if quick else rounds,
            json_file=json_file,
        )
        return
    try:
        options = Options(
            apps=apps,
            scale=scale,
            count=count,
            delays_ms=tuple(network_delay or (QUICK_DELAYS_MS if quick else DELAYS_MS)),
            rounds=min(rounds, 2) if quick else rounds,
            base_url=base_url,
            model=model,
            api_key=key_of_option(api_key) if api_key else None,
        )
        with console.status("starting") as status:
            outcomes = asyncio.run(run(options, status.update))
    except (BenchmarkError, ConfigError) as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        raise typer.Exit(1) from None
    show(outcomes)
    if json_file is not None:
        write_json(json_file, options, outcomes)
    if not all(outcome.same_texts for outcome in outcomes):
        raise typer.Exit(1)


def _check_by_policy(
    apps: Sequence[str],
    policies: Sequence[str] | None,
    delays: Sequence[float] | None,
    base_url: str | None,
    *,
    set_by_hand: bool,
) -> None:
    from parrot_scheduler.config import PRESETS

    for name in policies or ():
        if name not in PRESETS:
            raise typer.BadParameter(
                f"'{name}' is none of {', '.join(PRESETS)}", param_hint="--policy"
            )
    if not set_by_hand and not set(apps) <= set(BY_POLICY):
        raise typer.BadParameter(
            f"{' and '.join(BY_POLICY)} compare policies, the others ways of calling: run them "
            "apart, or pass --engines to compare policies by all of them",
            param_hint="--app",
        )
    for option, value in (("--network-delay", delays), ("--base-url", base_url)):
        if value:
            raise typer.BadParameter(
                "policies are compared on gateways of the benchmark's own, without a network",
                param_hint=option,
            )


def _compare_policies(
    apps: Sequence[str],
    policies: Sequence[str],
    *,
    engines: int,
    model: str,
    count: int | None,
    scale: float | None,
    rounds: int,
    json_file: Path | None,
) -> None:
    from rich.console import Console

    # The command line must not wait for an HTTP client to be imported.
    from parrot_gateway.bench.apps import policy_report
    from parrot_gateway.bench.apps.policies import compare

    console = Console(stderr=True)
    try:
        with console.status("starting") as status:
            outcomes = asyncio.run(
                compare(
                    apps,
                    policies,
                    engines=engines,
                    model=model,
                    count=count,
                    scale=scale,
                    rounds=rounds,
                    progress=status.update,
                )
            )
    except BenchmarkError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        raise typer.Exit(1) from None
    policy_report.show(outcomes)
    if json_file is not None:
        policy_report.write_json(json_file, outcomes, model=model, rounds=rounds)
    if not all(outcome.same_texts for outcome in outcomes):
        raise typer.Exit(1)


def write_json(path: Path, options: Options, outcomes: Sequence[AppOutcome]) -> None:
    """Write everything that was measured, and where; never the key."""
    from parrot_gateway.bench.apps.measure import to_dict

    content = {
        "benchmark": "apps",
        "machine": machine(),
        "model": options.model,
        "started_gateway": options.base_url is None,
        "rounds": options.rounds,
        "baselines": "clients named in each comparison; the other side is " + SEMANTIC,
        "apps": [to_dict(outcome) for outcome in outcomes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
