"""`parrot-gateway bench apps`: options, and what to run for them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from parrot_bench.apps.recipes import BY_POLICY as UNDER_POLICIES
from parrot_bench.apps.recipes import BY_WAY, UNDECLARED
from parrot_bench.apps.workload import SEMANTIC
from parrot_bench.report import JsonFile, load_average, run_with_progress, write_json
from parrot_gateway.settings import DEMO_MODEL

if TYPE_CHECKING:
    from parrot_bench.apps.arms import Arm

#: Applications that compare ways of calling, and those that compare policies of placement.
BY_CLIENT = ("chain", "map-reduce", "multi-agent", "chat")
BY_POLICY = ("gpts", "mixed")
POLICIES = ("parrot", "round-robin", "least-loaded")
MATRIX_POLICIES = (
    "parrot", "lmetric", "prefix-linear", "session-affinity", "paper", "round-robin",
)  # fmt: skip
ENGINES = 4

DELAYS_MS = (0.0, 50.0, 250.0)
QUICK_DELAYS_MS = (0.0, 250.0)
#: What `--compare policies` runs by itself, and under which policies.
MATRIX = ("gpts", "mixed", "agents", "multi-agent", "map-reduce")
#: Of `linking.use`.
USES = ("lengths", "groups", "sessions", "prefixes")
#: Of `--compare linking`, and with `--quick`.
KV_SHARE, QUICK_ENGINES = 0.5, 2


class Compared(StrEnum):
    """What a run compares."""

    WAYS = "ways"
    POLICIES = "policies"
    LINKING = "linking"


#: By what is compared: the applications there are, and those that run where none is named.
RECIPES_OF = {
    Compared.WAYS: BY_WAY,
    Compared.POLICIES: UNDER_POLICIES,
    Compared.LINKING: UNDECLARED,
}
DEFAULTS = {
    Compared.WAYS: BY_CLIENT,
    Compared.POLICIES: MATRIX,
    Compared.LINKING: tuple(UNDECLARED),
}


def apps_command(
    app: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(BY_WAY)}; repeatable. {' and '.join(BY_POLICY)} compare policies of "
            "placement on several engines, the others ways of calling. With --compare linking: "
            f"{', '.join(UNDECLARED)}; with --compare policies also agents and sessions.",
            show_default=f"{', '.join(BY_CLIENT)}; all of --compare linking; "
            f"{', '.join(MATRIX)} of --compare policies",
        ),
    ] = None,
    compare: Annotated[
        Compared | None,
        typer.Option(
            help="Ways of calling, policies of placement, or what linking gains applications that "
            "declare nothing: with it, without it, and declared.",
            show_default="policies with --engines or --policy, else ways",
        ),
    ] = None,
    engines: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Compare policies, each with so many engine processes of its own.",
            show_default=f"{ENGINES} for {', '.join(BY_POLICY)} and --compare linking",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A policy to compare, as `serve --policy` takes it; the first is compared with "
            "each other; repeatable. With --compare linking: one to compare with, without linking.",
            show_default=f"{', '.join(POLICIES)}; {', '.join(MATRIX_POLICIES)} of --compare "
            "policies; lmetric and prefix-linear for linking's sessions",
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
            help="Steps, chunks, branches, chats or calls; programs, agents or chats with "
            "--compare linking.",
            show_default="the paper's; 40 calls of gpts, 200 agents of sessions; 24 documents, 6 "
            "programs of --compare policies",
        ),
    ] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"With --compare linking: also with this use alone, of {', '.join(USES)}; "
            "repeatable.",
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
            min=0.01,
            help="With --compare policies or linking: so many times as fast do jobs arrive; "
            "repeatable.",
            show_default="1",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="S",
            help="With --compare policies or linking: no round begins that would end so many "
            "seconds after its application (at its load) was begun; there is one at least.",
        ),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="With --compare linking: of the texts; with --compare policies also of lengths "
            "and arrivals, one round after the other; repeatable.",
            show_default="0",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="With --compare policies or linking: a setting of the engines, as in a gateway's "
            "`models`, e.g. device=cuda:0,cuda:1; repeatable.",
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
        bool,
        typer.Option(
            "--quick",
            help="Two rounds, without network and at 250 ms; with --compare linking two engines, "
            "an eighth of the applications, half the lengths.",
        ),
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

    Or, on several engines, under different policies of placement; or with and without linking.
    """
    # The command line must not wait for an HTTP client to be imported.
    from parrot_bench.apps import comparison, measure, tables
    from parrot_gateway.settings.secret_reference import key_of_option

    by_policy = engines or policy or set(app or ()) & set(BY_POLICY)
    if compare is None and by_policy:
        _check_by_policy(app or BY_CLIENT, engines, policy)
    kind = compare or (Compared.POLICIES if by_policy else Compared.WAYS)
    recipes = RECIPES_OF[kind]
    default = BY_CLIENT if compare is None else DEFAULTS[kind]
    apps = tuple(dict.fromkeys(app or default))
    _check_names("--app", apps, recipes)
    rounds = min(rounds, 2) if quick else rounds
    content: dict[str, Any] = {"model": model, "rounds": rounds, "load_average": load_average()}
    plain: list[dict[str, Any]]
    if kind is Compared.WAYS:
        plan = measure.Plan(apps, model, rounds, count, scale)
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
        content |= {
            "started_gateway": base_url is None,
            "baselines": "clients named in each comparison; the other side is " + SEMANTIC,
        }
        plain = [measure.to_dict(outcome) for outcome in by_way]
    else:
        _check_alone(policy, network_delay, base_url)
        _check_names("--use", use or (), USES)
        linking = kind is Compared.LINKING
        policies = tuple(dict.fromkeys(policy or ()))
        uses = tuple(dict.fromkeys(use or ()))
        named = policies or (MATRIX_POLICIES if compare else POLICIES)

        def arms_of(name: str) -> list[Arm]:
            if linking:
                return comparison.linking_arms(name, policies, uses)
            return comparison.policy_arms(name, named)

        compared = comparison.ComparisonPlan(
            recipes=recipes,
            arms=arms_of,
            model=model,
            engines=engines or (QUICK_ENGINES if quick and linking else ENGINES),
            rounds=rounds,
            count=count,
            scale=scale,
            cold=not linking,
            kv_share=kv_share if linking else None,
            loads=tuple(dict.fromkeys(load or [1.0])),
            seeds=tuple(dict.fromkeys(seed or [0])),
            quick=quick and linking,
            time_limit_s=time_limit or math.inf,
            settings=_settings_of(setting or ()),
        )
        found = run_with_progress(
            lambda progress: asyncio.run(comparison.compare(compared, apps, progress))
        )
        tables.show_arms(found)
        same_texts = all(outcome.same_texts for outcome in found)
        plain = [comparison.to_dict(outcome) for outcome in found]
    if json_file is not None:
        write_json(json_file, f"apps, by {kind}", content | {"apps": plain})
    if not same_texts:
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


def _check_by_policy(
    apps: Sequence[str], engines: int | None, policies: Sequence[str] | None
) -> None:
    if not (engines or policies) and not set(apps) <= set(BY_POLICY):
        raise typer.BadParameter(
            f"{' and '.join(BY_POLICY)} compare policies, the others ways of calling: run them "
            "apart, or pass --engines to compare policies by all of them",
            param_hint="--app",
        )


def _check_alone(
    policies: Sequence[str] | None, delays: Sequence[float] | None, base_url: str | None
) -> None:
    """Refuse what goes with one server and a network only."""
    from parrot_scheduler.config import PRESETS

    _check_names("--policy", policies or (), PRESETS)
    for option, value in (("--network-delay", delays), ("--base-url", base_url)):
        if value:
            raise typer.BadParameter(
                "policies and linking are compared on gateways of the benchmark's own, without a "
                "network",
                param_hint=option,
            )
