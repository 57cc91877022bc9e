"""`simulate workload`: one workload under some policies, once or for values of a parameter."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from parrot_bench.simulate.output import Json, fail, named, report

if TYPE_CHECKING:
    from parrot_scheduler.config import SchedulerConfig

    from parrot_bench.simulator.metrics import Results
    from parrot_bench.simulator.options import Network, SimulationOptions
    from parrot_bench.simulator.plan import Workload

PROGRESS_INTERVAL_S = 1.0


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
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Kind of engine, or a file of `simulate fit`; an unknown name lists them.",
        ),
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
    json: Json = None,
    plots: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw pictures.")] = None,
    png: Annotated[bool, typer.Option("--png", help="Pictures as PNG, not SVG.")] = False,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record the scheduler's events.")
    ] = None,
) -> None:
    """Run the scheduler on a virtual clock, with simulated clients and engines."""
    from parrot_bench.simulator.fitting import read_profile
    from parrot_bench.simulator.options import SimulationOptions, Staleness
    from parrot_bench.simulator.plan import ClientMode
    from parrot_bench.simulator.profiles import PROFILES
    from parrot_bench.simulator.reports import plots as pictures
    from parrot_bench.simulator.reports.tables import table, write_json
    from parrot_bench.simulator.simulation import SimulationStuckError

    try:
        is_file = profile not in PROFILES and Path(profile).is_file()
        known = (
            {profile: read_profile(Path(profile).read_text(encoding="utf-8"))}
            if is_file
            else PROFILES
        )
        kind = named(profile, known, "profile").with_(
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
            raise ValueError("--log records one run: name one --policy, and no --sweep")
        if plots is not None:
            pictures.require_matplotlib()
        options = SimulationOptions(
            engines=[kind] * engines,
            mode=named(mode, {name: name for name in get_args(ClientMode)}, "mode"),
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
                results[run_name] = sweeps.setdefault(name, {})[value] = _run_workload(
                    run_name,
                    _workload(workload, settings, scale, seed),
                    replace(options, config=config),
                    log,
                )
        typer.echo(table(results))
        if json is not None:
            write_json(results, json)
        if plots is not None:
            suffix = "png" if png else "svg"
            paths = pictures.draw(results, plots, suffix)
            if swept:
                paths.append(pictures.draw_load(sweeps, plots / f"load.{suffix}", swept))
            for path in paths:
                report(f"drew {path}")
    except (OSError, ValueError, pictures.PlotsUnavailableError, SimulationStuckError) as error:
        fail(str(error))


def _run_workload(
    name: str, workload: Workload, options: SimulationOptions, log: Path | None
) -> Results:
    from parrot_bench.simulator.recording import LogFile
    from parrot_bench.simulator.simulation import simulate

    started, started_cpu = time.perf_counter(), time.process_time()
    with ExitStack() as stack:
        recorder = None
        if log is not None:
            file = stack.enter_context(log.open("w", encoding="utf-8"))
            recorder = LogFile(file, options.config)
        options = replace(options, log=recorder, progress=_progress(name, started))
        results = simulate(workload, options)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    report(
        f"{name}: {results.total.calls} calls, {results.events} events, "
        f"{results.duration_s:.1f} virtual s in {seconds:.1f} s "
        f"({results.events / seconds:,.0f} events/s; {cpu_s:.1f} s of CPU, "
        f"{1e6 * cpu_s / max(results.total.calls, 1):,.0f} us a call)"
    )
    return results


def _progress(name: str, started: float) -> Callable[[int, float], None]:
    last = started

    def show(ended: int, now: float) -> None:
        nonlocal last
        moment = time.perf_counter()
        if moment - last >= PROGRESS_INTERVAL_S:
            last = moment
            after = f"{now:.1f} virtual s after {moment - started:.0f} s"
            report(f"{name}: {ended} applications, {after}")

    return show


def _workload(name: str | None, parameters: list[str], scale: float | None, seed: int) -> Workload:
    from parrot_bench.simulator.traces import open_trace
    from parrot_bench.simulator.workloads import WORKLOADS, build

    known = ", ".join(WORKLOADS)
    if name is None:
        raise ValueError(f"WORKLOAD is missing; there are {known}, or a trace file")
    if name not in WORKLOADS:
        if not Path(name).is_file():
            raise ValueError(f"there is no workload and no file {name!r}; there are {known}")
        if parameters or scale is not None:
            raise ValueError("--set and --scale are for workloads, not for traces")
        return open_trace(name)
    values: dict[str, str | float] = {"seed": seed}
    if scale is not None:
        values["scale"] = scale
    for item in parameters:
        key, separator, value = item.partition("=")
        if not (key and separator and value):
            raise ValueError(f"--set {item!r}: expected NAME=VALUE")
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
        raise ValueError(f"--sweep {text!r}: expected NAME=V1,V2,… with numbers")
    return name, numbers


def _configs(names: str, changes: dict[str, str]) -> dict[str, SchedulerConfig]:
    from parrot_scheduler.config import PRESETS
    from parrot_scheduler.scheduler import policies_of

    configs = {}
    for name in names.split(","):
        preset = named(name, PRESETS, "policy")
        configs[name] = replace(preset, **changes)  # type: ignore[arg-type]
        policies_of(configs[name])
    return configs


def _network(text: str) -> Network:
    from parrot_bench.simulator.options import Network

    low, _, high = text.partition("-")
    try:
        return Network(float(low) / 1000, float(high or low) / 1000)
    except ValueError:
        raise ValueError(
            f"--network-ms {text!r}: expected a time in milliseconds, or two as in 200-300"
        ) from None
