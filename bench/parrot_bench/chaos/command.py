"""`parrot-gateway bench chaos`: nothing of a call may be lost while engines die."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from parrot_bench.report import JsonFile, load_average, print_table, run_with_progress, write_json
from parrot_bench.tables import number

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    from parrot_bench.chaos.load import Phase
    from parrot_bench.chaos.oracle import Oracle

_FAULTS = Literal["kill", "stop", "cut", "replace", "none"]
#: Causes that are listed below the table.
_SHOWN_REASONS = 20


@dataclass(frozen=True, slots=True)
class Options:
    """The load, the engines under it, and their faults."""

    fault: _FAULTS
    upstreams: bool
    engines: int
    streams: int
    tokens: int
    seconds: float
    calm_s: float
    every: float
    at_once: int
    stop_s: float
    graphs: bool


@dataclass(slots=True)
class PhaseOutcome:
    """The figures of one phase, as they are shown."""

    name: str
    seconds: float
    calls: int
    failed: int
    hung: int
    protocol: int
    violations: int
    usage: int
    compared: int
    different: int
    graphs: int
    graphs_failed: int
    graphs_different: int
    tokens_per_s: float
    faults: int
    skipped: int
    #: In milliseconds: of all answers under way at a fault, and of the longest of each fault.
    pause_p50: float
    pause_p99: float
    pause_max: float
    worst_p50: float
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        return self.failed + self.protocol + self.violations + self.usage + self.graphs_failed


@dataclass(slots=True)
class Outcome:
    """A whole run.

    Attributes:
        compares: answers must be the same as without a fault. Servers of an upstream that go on
            with a text draw other random numbers.
    """

    phases: list[PhaseOutcome]
    restarts: int
    #: Engines or servers that did not come back.
    absent: int
    #: Calls and contexts that remained when no client was left.
    left_behind: int
    compares: bool = True

    @property
    def lost(self) -> int:
        """Count failed calls, broken answers, leftovers, and engines that did not come back;
        different answers only where phases without faults had none."""
        calm = [each for each in self.phases if not each.faults]
        is_exact = not any(each.different + each.graphs_different for each in calm)
        different = sum(each.different + each.graphs_different for each in self.phases)
        lost = sum(each.lost for each in self.phases) + self.absent + self.left_behind
        return lost + different if self.compares and is_exact else lost


def run(options: Options, progress: Callable[[str], None] = lambda _: None) -> Outcome:
    """Run the benchmark.

    Raises:
        BenchmarkError: a server did not start or went away.
    """
    return asyncio.run(_run(options, progress))


async def _run(options: Options, progress: Callable[[str], None]) -> Outcome:
    from parrot_bench.chaos.load import Load, strikes
    from parrot_bench.chaos.mix import KINDS, PLAIN, requests
    from parrot_bench.chaos.oracle import Oracle
    from parrot_bench.chaos.targets import Plan, missing, started

    progress("starting engines")
    plan = Plan(options.fault, options.engines, options.upstreams, options.stop_s)
    async with started(plan) as (client, targets):
        kinds = PLAIN if options.upstreams else KINDS
        mix = requests(client.model, options.streams, options.tokens, kinds)
        load = Load(client, mix, options.streams, with_graphs=options.graphs)
        progress("every call once, without faults")
        reference = await load.once("reference")
        oracle = Oracle(reference.answers)
        phases = [reference]
        progress("without faults, before")
        phases.append(await load.during("before", options.calm_s))
        absent = 0
        if options.fault != "none":
            progress(f"{options.fault} every {options.every:g} s")
            faults = strikes(targets, options.every, options.at_once)
            phases.append(await load.during(options.fault, options.seconds, faults))
            progress("waiting for all to be back")
            absent = await missing(targets, options.engines)
            progress("without faults, after")
            phases.append(await load.during("after", options.calm_s))
        texts = {each.name: each.texts for each in reference.graphs if not each.failure}
        return Outcome(
            [_outcome(phase, oracle, texts, options.every) for phase in phases],
            await targets.restarts(),
            absent,
            await load.left_behind(),
            compares=not options.upstreams,
        )


def _outcome(
    phase: Phase, oracle: Oracle, texts: dict[str, tuple[str, ...]], every: float
) -> PhaseOutcome:
    from parrot_bench.chaos.load import pauses
    from parrot_bench.load import Spread

    verdict = oracle.judge(phase.answers)
    failed = [run for run in phase.graphs if run.failure]
    different = sum(
        run.texts != texts[run.name]
        for run in phase.graphs
        if not run.failure and run.name in texts
    )
    began = min((answer.began for answer in phase.answers), default=0.0)
    # Without faults the same is asked of moments that mean nothing.
    moments = [strike.at for strike in phase.strikes] or [
        began + every * (step + 1) for step in range(int(phase.seconds / every))
    ]
    found = pauses(phase, moments, every)
    spread = Spread.of(list(chain.from_iterable(found)))
    worst = Spread.of([max(each) for each in found if each])
    reasons = verdict.reasons + Counter(f"{run.name}: {run.failure}" for run in failed)
    return PhaseOutcome(
        phase.name,
        phase.seconds,
        verdict.calls,
        verdict.failed,
        verdict.hung,
        verdict.protocol,
        verdict.violations,
        verdict.usage,
        verdict.compared,
        verdict.different,
        len(phase.graphs),
        len(failed),
        different,
        verdict.tokens / phase.seconds if phase.seconds else math.nan,
        len(phase.strikes),
        phase.skipped,
        spread.p50,
        spread.p99,
        spread.max,
        worst.p50,
        reasons,
    )


#: The rows of the table: a figure and the attribute that holds it.
_ROWS = (
    ("seconds", "seconds"),
    ("faults", "faults"),
    ("faults without anybody to strike", "skipped"),
    ("calls", "calls"),
    ("failed calls", "failed"),
    ("of them hung", "hung"),
    ("broken streams", "protocol"),
    ("grammar violations", "violations"),
    ("wrong usage", "usage"),
    ("compared answers", "compared"),
    ("different answers", "different"),
    ("deferred graphs", "graphs"),
    ("failed graphs", "graphs_failed"),
    ("different graphs", "graphs_different"),
    ("tokens/s", "tokens_per_s"),
    ("pause p50, ms", "pause_p50"),
    ("pause p99, ms", "pause_p99"),
    ("pause max, ms", "pause_max"),
    ("longest of a fault, p50, ms", "worst_p50"),
)
_NOTE = (
    "Pauses: of answers under way at a fault (without faults: at as many moments) the longest gap "
    "between chunks until the next one. Different: from the same call's first answer, which ran in "
    "other batches: phases without faults show how many differ by rounding alone."
)


def show(options: Options, outcome: Outcome) -> None:
    what = "servers of one upstream" if options.upstreams else "engines"
    again = f" every {options.every:g} s" + (
        f", {options.at_once} at once" if options.at_once > 1 else ""
    )
    title = (
        f"bench chaos: {options.fault}{again if options.fault != 'none' else ''}; "
        f"{options.engines} {what}, {options.streams} clients, {options.tokens} tokens a candidate"
    )
    head = ("", *(phase.name for phase in outcome.phases))
    rows = [
        (name, *(number(float(getattr(phase, key))) for phase in outcome.phases))
        for name, key in _ROWS
    ]
    print_table(head, rows, title=title)
    typer.echo(
        f"Restarts or new links: {outcome.restarts}; did not come back: {outcome.absent}; "
        f"calls and contexts left behind: {outcome.left_behind}."
    )
    for phase in outcome.phases:
        for reason, count in phase.reasons.most_common(_SHOWN_REASONS):
            typer.echo(f"  {phase.name}: {count} x {reason}")
    typer.echo(f"{_NOTE} Load average of this machine: {load_average()}.")
    typer.echo(f"LOST: {outcome.lost}" if outcome.lost else "Nothing was lost.")


def chaos_command(
    fault: Annotated[
        str,
        typer.Option(
            help="kill (SIGKILL), stop (SIGSTOP, then SIGCONT), cut (the engine's link), replace "
            "(drain, SIGTERM, a new process, one after the other), none."
        ),
    ] = "kill",
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between faults.")] = 5.0,
    seconds: Annotated[float, typer.Option(min=1, help="Of the phase with faults.")] = 120.0,
    calm: Annotated[
        float, typer.Option(min=1, help="Seconds without faults, before and after.")
    ] = 20.0,
    engines: Annotated[int, typer.Option(min=1, help="Engine processes, or servers.")] = 4,
    streams: Annotated[int, typer.Option(min=1, help="Clients; each sends call after call.")] = 200,
    tokens: Annotated[int, typer.Option(min=48, help="Of each candidate, at most.")] = 96,
    at_once: Annotated[int, typer.Option(min=1, help="Engines that a fault strikes.")] = 1,
    stop: Annotated[
        float,
        typer.Option(
            min=0.1, help="Seconds that `stop` lasts, and that `replace` waits for calls."
        ),
    ] = 3.0,
    upstreams: Annotated[
        bool, typer.Option("--upstreams", help="Strike servers of one upstream, not own engines.")
    ] = False,
    graphs: Annotated[
        bool, typer.Option(help="Deferred graphs as well: a chain of twenty and a map-reduce.")
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """Let engines die under load and count what clients lose; ends with 1 if it was anything."""
    if fault not in get_args(_FAULTS):
        raise typer.BadParameter(f"there are {', '.join(get_args(_FAULTS))}", param_hint="--fault")
    if upstreams and fault == "cut":
        raise typer.BadParameter("servers have no link that is cut", param_hint="--fault")
    options = Options(
        cast("_FAULTS", fault), upstreams, engines, streams, tokens, seconds, calm, every, at_once,
        stop, graphs,
    )  # fmt: skip
    outcome = run_with_progress(lambda progress: run(options, progress))
    show(options, outcome)
    if json_file is not None:
        from msgspec import to_builtins

        write_json(json_file, "chaos", {"options": to_builtins(options), **to_builtins(outcome)})
    if outcome.lost:
        raise typer.Exit(1)
