"""`parrot-gateway simulate WORKLOAD`: the scheduler on a virtual clock; options, progress, tables.

All that is simulated is in `parrot_simulator`; nothing here decides anything. What does
not begin with the name of another subcommand is a workload to simulate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from parrot_scheduler.config import SchedulerConfig
    from parrot_simulator.engines.profiles import EngineProfile
    from parrot_simulator.metrics import Results
    from parrot_simulator.options import Network, SimulationOptions
    from parrot_simulator.plan import Workload

PROGRESS_INTERVAL_S = 1.0


class SimulateError(Exception):
    """What was asked for cannot be simulated; the message names the option."""


class _WorkloadFirst(TyperGroup):
    """Takes anything that is no subcommand for arguments of `workload`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["workload", *args]
        return super().parse_args(ctx, args)


simulate = typer.Typer(
    cls=_WorkloadFirst,
    help="Run the scheduler on a virtual clock. `simulate WORKLOAD …` is short for `simulate "
    "workload WORKLOAD …`.",
)


@simulate.command("workload")
def workload_command(
    workload: Annotated[
        str | None,
        typer.Argument(
            help="Name of a workload, or a trace file (agentic_mooncake, Mooncake, Azure)."
        ),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Parameter of the workload, e.g. rate=8; repeatable.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=V1,V2,…",
            help="Run once for each value of a parameter of the workload, e.g. rate=1,2,4.",
        ),
    ] = None,
    engines: Annotated[int, typer.Option(min=0, help="Engines to simulate.")] = 4,
    profile: Annotated[
        str, typer.Option(help="Kind of engine; an unknown name lists them.")
    ] = "H200-8B",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,NAME,…",
            help="Scheduler set-ups to compare, with commas between; repeatable.",
            show_default="parrot",
        ),
    ] = None,
    admission: Annotated[
        str | None, typer.Option(help="Replace the set-up's admission policy.")
    ] = None,
    order: Annotated[str | None, typer.Option(help="Replace its order policy.")] = None,
    place: Annotated[str | None, typer.Option(help="Replace its placement policy.")] = None,
    keep: Annotated[str | None, typer.Option(help="Replace its retention policy.")] = None,
    mode: Annotated[
        str, typer.Option(help="What the server knows of applications: plain, session or graph.")
    ] = "graph",
    requests: Annotated[
        int | None, typer.Option(min=1, help="Applications to run at most.")
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Factor on all lengths.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the workload and the network.")] = 0,
    network_ms: Annotated[
        str, typer.Option(metavar="MS[-MS]", help="Round trip of clients: one time, or a range.")
    ] = "0",
    warm_up: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of applications not counted.")
    ] = 0.0,
    shared_attention: Annotated[
        bool, typer.Option(help="Engines read a shared prefix once per step.")
    ] = False,
    prefix_caching: Annotated[bool, typer.Option(help="Engines cache prefixes.")] = True,
    chunked_prefill: Annotated[bool, typer.Option(help="Engines fill prompts in chunks.")] = True,
    token_cap: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of an engine's running calls at most.", show_default=False
        ),
    ] = None,
    host_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens of KV in an engine's host memory.")
    ] = None,
    stale_ms: Annotated[
        float, typer.Option(min=0, help="How late the scheduler hears of caches and progress.")
    ] = 0.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all results.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw pictures.")] = None,
    png: Annotated[bool, typer.Option("--png", help="Pictures as PNG, not SVG.")] = False,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record the scheduler's events.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="LOG",
            help="Replay an event log, of a gateway or of --log, and compare the decisions.",
        ),
    ] = None,
) -> None:
    """Run the scheduler on a virtual clock, with simulated clients and engines."""
    from parrot_simulator.options import SimulationOptions, Staleness
    from parrot_simulator.plan import ClientMode

    try:
        if replay is not None:
            _replay(replay)
            return
        if workload is None:
            raise SimulateError(f"WORKLOAD is missing; there are {_workloads()}, or a trace file")
        kind = _profile(profile).with_(
            prefix_caching=prefix_caching,
            chunked_prefill=chunked_prefill,
            shared_attention=shared_attention,
            token_cap=token_cap,
        )
        if host_tokens is not None:
            kind = kind.with_(host_tokens=host_tokens)
        changes = {"admission": admission, "order": order, "place": place, "keep": keep}
        configs = _configs(
            ",".join(policy or ["parrot"]), {k: v for k, v in changes.items() if v is not None}
        )
        swept, values = _sweep(sweep)
        if log is not None and len(configs) * len(values) > 1:
            raise SimulateError("--log records one run: name one --policy, and no --sweep")
        if plots is not None:
            from parrot_simulator.reports.plots import require_matplotlib

            require_matplotlib()
        if mode not in get_args(ClientMode):
            raise SimulateError(f"--mode {mode!r}: there are {', '.join(get_args(ClientMode))}")
        options = SimulationOptions(
            engines=[kind] * engines,
            mode=cast("ClientMode", mode),
            network=_network(network_ms),
            seed=seed,
            warm_up=warm_up,
            max_applications=requests,
            staleness=Staleness(*[stale_ms / 1000] * 3),
            timelines=plots is not None and not swept,
        )
        results: dict[str, Results] = {}
        sweeps: dict[str, dict[float, Results]] = {}
        for name, config in configs.items():
            for value in values:
                run_name = f"{name} {swept}={value:g}" if swept else name
                settings = [*(parameter or []), *([f"{swept}={value}"] if swept else [])]
                results[run_name] = sweeps.setdefault(name, {})[value] = _run(
                    run_name,
                    _workload(workload, settings, scale, seed),
                    replace(options, config=config),
                    log,
                )
        _show(results, json)
        if plots is not None:
            _draw(results, sweeps, swept, plots, "png" if png else "svg")
    except (SimulateError, OSError, ValueError) as error:
        _fail(str(error))
    except Exception as error:
        from parrot_simulator.reports.plots import PlotsUnavailableError
        from parrot_simulator.simulation import SimulationStuckError

        if isinstance(error, PlotsUnavailableError | SimulationStuckError):
            _fail(str(error))
        raise


def _run(name: str, workload: Workload, options: SimulationOptions, log: Path | None) -> Results:
    from parrot_simulator.recording import LogFile
    from parrot_simulator.simulation import simulate

    started = time.perf_counter()
    with ExitStack() as stack:
        recorder = None
        if log is not None:
            file = stack.enter_context(log.open("w", encoding="utf-8"))
            recorder = LogFile(file, options.config)
        options = replace(options, log=recorder, progress=_progress(name, started))
        results = simulate(workload, options)
    seconds = time.perf_counter() - started
    typer.echo(
        f"{name}: {results.total.calls} calls, {results.events} events, "
        f"{results.duration_s:.1f} virtual s in {seconds:.1f} s "
        f"({results.events / seconds:,.0f} events/s)",
        err=True,
    )
    return results


def _progress(name: str, started: float) -> Callable[[int, float], None]:
    last = started

    def show(ended: int, now: float) -> None:
        nonlocal last
        moment = time.perf_counter()
        if moment - last >= PROGRESS_INTERVAL_S:
            last = moment
            sys.stderr.write(
                f"{name}: {ended} applications, {now:.1f} virtual s "
                f"after {moment - started:.0f} s\n"
            )

    return show


def _show(results: dict[str, Results], json: Path | None) -> None:
    from parrot_simulator.reports.tables import table, write_json

    typer.echo(table(results))
    if json is not None:
        write_json(results, json)


def _draw(
    results: dict[str, Results],
    sweeps: dict[str, dict[float, Results]],
    swept: str,
    folder: Path,
    suffix: str,
) -> None:
    from parrot_simulator.reports.plots import draw, draw_load

    paths = draw(results, folder, suffix)
    if swept:
        paths.append(draw_load(sweeps, folder / f"load.{suffix}", swept))
    for path in paths:
        typer.echo(f"drew {path}", err=True)


def _replay(path: Path) -> None:
    from parrot_simulator.recording import compare

    with path.open(encoding="utf-8") as lines:
        try:
            outcome = compare(lines)
        except ValueError as error:
            raise SimulateError(f"--replay {path}: {error}") from None
    if outcome.differs_at is not None:
        typer.echo(f"step {outcome.differs_at} is decided otherwise:")
        typer.echo(f"  recorded: {outcome.recorded[:2000]}")
        typer.echo(f"  replayed: {outcome.replayed[:2000]}")
        raise typer.Exit(1)
    if not outcome.compared:
        raise SimulateError(f"--replay {path}: {outcome.steps} steps, but no decisions to compare")
    typer.echo(f"{outcome.compared} of {outcome.steps} steps: the same decisions, byte for byte")


def _workloads() -> str:
    from parrot_simulator.workloads import WORKLOADS

    return ", ".join(WORKLOADS)


def _workload(name: str, parameters: list[str], scale: float | None, seed: int) -> Workload:
    from parrot_simulator.traces import open_trace
    from parrot_simulator.workloads import WORKLOADS, build

    if name not in WORKLOADS:
        if not Path(name).is_file():
            raise SimulateError(
                f"there is no workload and no file {name!r}; there are {_workloads()}"
            )
        if parameters or scale is not None:
            raise SimulateError("--set and --scale are for workloads, not for traces")
        return open_trace(name)
    values: dict[str, str | float] = {"seed": seed}
    if scale is not None:
        values["scale"] = scale
    for item in parameters:
        key, separator, value = item.partition("=")
        if not (key and separator and value):
            raise SimulateError(f"--set {item!r}: expected NAME=VALUE")
        values[key.replace("-", "_")] = value
    return build(name, values)


def _sweep(text: str | None) -> tuple[str, list[float]]:
    """The parameter and its values; a nameless one with one value when nothing is swept."""
    if text is None:
        return "", [0.0]
    name, _, values = text.partition("=")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    if not name or not numbers:
        raise SimulateError(f"--sweep {text!r}: expected NAME=V1,V2,… with numbers")
    return name, numbers


def _profile(name: str) -> EngineProfile:
    from parrot_simulator.engines.profiles import PROFILES

    if name not in PROFILES:
        raise SimulateError(f"--profile {name!r}: there are {', '.join(PROFILES)}")
    return PROFILES[name]


def _configs(names: str, changes: dict[str, str]) -> dict[str, SchedulerConfig]:
    from parrot_scheduler.config import PRESETS
    from parrot_scheduler.scheduler import policies_of

    configs = {}
    for name in names.split(","):
        if name not in PRESETS:
            raise SimulateError(f"--policy {name!r}: there are {', '.join(PRESETS)}")
        configs[name] = replace(PRESETS[name], **changes)  # type: ignore[arg-type]
        policies_of(configs[name])
    return configs


def _network(text: str) -> Network:
    from parrot_simulator.options import Network

    low, _, high = text.partition("-")
    try:
        return Network(float(low) / 1000, float(high or low) / 1000)
    except ValueError:
        raise SimulateError(
            f"--network-ms {text!r}: expected a time in milliseconds, or two as in 200-300"
        ) from None


def _fail(message: str) -> None:
    typer.secho(message, err=True, fg=typer.colors.RED)
    raise typer.Exit(2)
