"""`parrot-gateway bench apps`: options, and what to run for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from parrot_gateway.bench.apps.applications import RECIPES
from parrot_gateway.bench.apps.workload import SEMANTIC
from parrot_gateway.bench.report import JsonFile, load_average, run_with_progress, write_json
from parrot_gateway.settings import DEMO_MODEL

#: Applications that compare ways of calling, and those that compare policies of placement.
BY_CLIENT = tuple(name for name, recipe in RECIPES.items() if not recipe.by_policy)
BY_POLICY = tuple(name for name, recipe in RECIPES.items() if recipe.by_policy)
POLICIES = ("parrot", "round-robin", "least-loaded")
ENGINES = 4

DELAYS_MS = (0.0, 50.0, 250.0)
QUICK_DELAYS_MS = (0.0, 250.0)


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
    json_file: JsonFile = None,
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
    # The command line must not wait for an HTTP client to be imported.
    from parrot_gateway.bench.apps import measure, policies, tables
    from parrot_gateway.settings.secret_reference import key_of_option

    apps = tuple(dict.fromkeys(app or BY_CLIENT))
    _check_names("--app", apps, RECIPES)
    plan = measure.Plan(apps, model, min(rounds, 2) if quick else rounds, count, scale)
    content: dict[str, Any]
    if engines or policy or set(apps) & set(BY_POLICY):
        _check_by_policy(apps, policy, network_delay, base_url, set_by_hand=bool(engines or policy))
        compared = tuple(dict.fromkeys(policy or POLICIES))
        by_policy = run_with_progress(
            lambda progress: asyncio.run(
                policies.compare_policies(plan, compared, engines or ENGINES, progress)
            )
        )
        tables.show_policies(by_policy)
        same_texts = all(outcome.same_texts for outcome in by_policy)
        name, content = "apps, by policy", {"load_average": load_average()}
        plain = [policies.to_dict(outcome) for outcome in by_policy]
    else:
        delays_ms = network_delay or (QUICK_DELAYS_MS if quick else DELAYS_MS)
        by_way = run_with_progress(
            lambda progress: asyncio.run(
                measure.compare_ways(
                    plan, delays_ms, base_url, key_of_option(api_key) if api_key else None, progress
                )
            )
        )
        tables.show_ways(by_way)
        same_texts = all(outcome.same_texts for outcome in by_way)
        name, content = (
            "apps",
            {
                "started_gateway": base_url is None,
                "baselines": "clients named in each comparison; the other side is " + SEMANTIC,
            },
        )
        plain = [measure.to_dict(outcome) for outcome in by_way]
    if json_file is not None:
        content |= {"model": model, "rounds": plan.rounds, "apps": plain}
        write_json(json_file, name, content)
    if not same_texts:
        raise typer.Exit(1)


def _check_names(option: str, names: Sequence[str], known: Sequence[str] | dict[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"'{name}' is none of {', '.join(known)}", param_hint=option)


def _check_by_policy(
    apps: Sequence[str],
    policies: Sequence[str] | None,
    delays: Sequence[float] | None,
    base_url: str | None,
    *,
    set_by_hand: bool,
) -> None:
    from parrot_scheduler.config import PRESETS

    _check_names("--policy", policies or (), PRESETS)
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
