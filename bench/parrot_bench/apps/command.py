"""`parrot-gateway bench apps`: options, and what to run for them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from parrot_bench.apps.recipes import BY_WAY, MANY
from parrot_bench.report import JsonFile, load_average, run_with_progress, write_json
from parrot_gateway.settings import DEMO_MODEL

if TYPE_CHECKING:
    from parrot_bench.apps.arms import Arm

POLICIES = ("parrot", "lmetric", "prefix-linear", "session-affinity", "paper", "round-robin")
#: Simulated round trips where ways are compared, and with `--quick`.
DELAYS_MS, QUICK_DELAYS_MS = (0.0, 50.0, 250.0), (0.0, 250.0)
#: Engines of an arm of policies or linking, and of linking with `--quick`.
ENGINES, QUICK_ENGINES = 4, 2
KV_SHARE = 0.5


class Compared(StrEnum):
    """The subjects of a comparison."""

    WAYS = "ways"
    POLICIES = "policies"
    LINKING = "linking"


#: Applications that run where none is named.
DEFAULTS = {
    Compared.WAYS: tuple(BY_WAY),
    Compared.POLICIES: ("gpts", "mixed", "agents", "multi-agent", "map-reduce"),
    Compared.LINKING: ("multi-agent", "agents", "mixed", "sessions"),
}


def apps_command(
    app: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(BY_WAY)}; of policies and linking: {', '.join(MANY)}; repeatable.",
            show_default="; ".join(", ".join(names) for names in DEFAULTS.values()),
        ),
    ] = None,
    compare: Annotated[
        Compared,
        typer.Option(
            help="Ways of calling, policies of placement, or what linking gains applications that "
            "declare nothing: without it, with it, and declared."
        ),
    ] = Compared.WAYS,
    engines: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Engine processes of each arm.",
            show_default=f"1 of ways, else {ENGINES}",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A policy to compare, as `serve --policy` takes it; the first is compared with "
            "each other; repeatable. With --compare linking: one to compare with, without linking.",
            show_default=f"{', '.join(POLICIES)}; lmetric and prefix-linear for linking's sessions",
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Multiplies the paper's numbers of tokens.", show_default="0.04 to 0.25"
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps, chunks, files, chats, calls, agents, programs or documents.",
            show_default="the paper's",
        ),
    ] = None,
    kv_share: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="With --compare linking: of the tokens of a run, as large a share fits into the "
            "KV of all engines together.",
        ),
    ] = KV_SHARE,
    load: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01, help="Jobs arrive so many times as fast; repeatable.", show_default="1"
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="S",
            help="No round begins that would end so many seconds after its application (at its "
            "load) was begun; there is one at least.",
        ),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Of lengths, arrivals and texts, one round after the other; repeatable.",
            show_default="0",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of the engines, as in a gateway's `models`, e.g. "
            "device=cuda:0,cuda:1; repeatable.",
        ),
    ] = None,
    network_delay: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            metavar="MS",
            help="Simulated round trip between client and gateway; repeatable.",
            show_default="0, 50 and 250 of ways, else 0",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each arm.")] = 5,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Two rounds, without network and at 250 ms; with --compare linking two engines, "
            "an eighth of the applications, half the lengths.",
        ),
    ] = False,
    json_file: JsonFile = None,
    model: Annotated[str, typer.Option(help="Model to call.")] = DEMO_MODEL,
) -> None:
    """Run the paper's applications call by call and with semantic variables, and compare.

    Or, on several engines, under different policies of placement; or with and without linking.
    Every arm has a gateway and engines of its own.
    """
    # The command line must not wait for an HTTP client to be imported.
    from parrot_bench.apps import comparison, tables
    from parrot_bench.policies import preset_of

    ways, linking = compare is Compared.WAYS, compare is Compared.LINKING
    recipes = BY_WAY if ways else MANY
    apps = tuple(dict.fromkeys(app or DEFAULTS[compare]))
    _check_names("--app", apps, recipes)
    for each in policy or ():
        try:
            preset_of(each)
        except ValueError as error:
            raise typer.BadParameter(f"'{each}': {error}", param_hint="--policy") from None
    policies = tuple(dict.fromkeys(policy or ()))
    delays_ms = network_delay or ((QUICK_DELAYS_MS if quick else DELAYS_MS) if ways else [0.0])

    def arms_of(name: str) -> list[Arm]:
        if ways:
            return comparison.way_arms(name)
        if linking:
            return comparison.linking_arms(name, policies)
        return comparison.policy_arms(name, policies or POLICIES)

    plan = comparison.ComparisonPlan(
        recipes=recipes,
        arms=arms_of,
        model=model,
        engines=engines or (1 if ways else QUICK_ENGINES if quick and linking else ENGINES),
        rounds=min(rounds, 2) if quick else rounds,
        count=count,
        scale=scale,
        cold=not linking,
        kv_share=kv_share if linking else None,
        loads=tuple(dict.fromkeys(load or [1.0])),
        delays_ms=tuple(dict.fromkeys(delays_ms)),
        seeds=tuple(dict.fromkeys(seed or [0])),
        quick=quick and linking,
        time_limit_s=time_limit or math.inf,
        settings=_settings_of(setting or ()),
    )
    found = run_with_progress(
        lambda progress: asyncio.run(comparison.compare(plan, apps, progress))
    )
    tables.show_arms(found)
    if json_file is not None:
        content = {
            "model": model,
            "rounds": plan.rounds,
            "load_average": load_average(),
            "apps": [comparison.to_dict(outcome) for outcome in found],
        }
        write_json(json_file, f"apps, by {compare}", content)
    if not all(outcome.same_texts for outcome in found):
        raise typer.Exit(1)


def _check_names(option: str, names: Sequence[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"'{name}' is none of {', '.join(known)}", param_hint=option)


def _settings_of(given: Sequence[str]) -> dict[str, Any]:
    """Settings of a model; numbers and the like are read as JSON, all else is text."""
    found: dict[str, Any] = {}
    for item in given:
        name, separator, value = item.partition("=")
        if not (name and separator and value):
            raise typer.BadParameter(f"'{item}': expected NAME=VALUE", param_hint="--set")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name] = value
    return found
