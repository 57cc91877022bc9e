"""The command line: `parrot-gateway serve | engine | graph | bench | simulate | doctor`.

Only parses and prints; a command imports what it needs.
"""

from __future__ import annotations

import gc
import io
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from parrot_gateway import __version__
from parrot_gateway.cli.commands import PASS_ON, LazyGroup, become

if TYPE_CHECKING:
    from parrot_gateway.server.gateway import Gateway
    from parrot_gateway.settings.model import ModelSettings, Settings
    from parrot_gateway.settings.sources import SettingsSources


class _Commands(LazyGroup):
    """Commands of this file and of other modules."""

    targets: ClassVar = {
        "graph": "parrot_gateway.cli.graph:graph_command",
        "explain": "parrot_gateway.cli.explain:explain_command",
        "bench": "parrot_gateway.cli.bench:bench",
        "models": "parrot_gateway.cli.models:models",
        "engines": "parrot_gateway.cli.engines:engines",
        "top": "parrot_gateway.cli.top:top_command",
        "import": "parrot_gateway.cli.import_settings:import_command",
        "replay": "parrot_gateway.cli.replay:replay_command",
        "simulate": "parrot_gateway.cli.bench:simulate",
    }


app = typer.Typer(
    name="parrot-gateway",
    cls=_Commands,
    help="An OpenAI-compatible gateway that sees the application behind the calls.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line."""
    if sys.stdout is None:
        # The shell closed it (`>&-`): output is lost, but the command still works.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):
        # A character unknown to the terminal must not end a command.
        sys.stdout.reconfigure(errors="replace")
    app()


@contextmanager
def _quick_imports() -> Iterator[None]:
    """Import without the garbage collector, which would take a tenth of the time and find
    nothing.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"parrot-gateway {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def serve(
    model: Annotated[
        list[str] | None, typer.Option(help="Folder or hub id of a model to run; repeatable.")
    ] = None,
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="OpenAI-compatible server to pass calls to; repeatable, with the same NAME for "
            "several servers of the same models. Its key is read from the environment variable "
            "NAME_API_KEY.",
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ALIAS=MODEL",
            help="Serve MODEL under another name too, e.g. gpt-4o=parrot-demo; * matches any "
            "name; repeatable.",
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="LoRA adapter (a PEFT folder) of the one model that is run, served under NAME; "
            "repeatable.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 takes a free one.", show_default="8000")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="env:NAME",
            help="Environment variable with the key that clients must send; PARROT_API_KEY is "
            "read without this. Needed for any address but loopback.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="How calls are placed on engines: parrot, or a class by its import path "
            "(package.module:Class).",
            show_default="parrot",
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error.", show_default="info")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="text for people, or json for programs.", show_default="text")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Start nothing: show what would be served and all that is wrong; status 2 if "
            "anything is.",
        ),
    ] = False,
) -> None:
    """Start the gateway; without a model or an upstream it runs the demo model."""
    with _quick_imports():
        from parrot_gateway.settings.config_file import ConfigError
        from parrot_gateway.settings.sources import check_exposure
        from parrot_gateway.settings.targets import check_targets

    flags: dict[str, Any] = {}
    server = {"host": host, "port": port, "api_key": api_key, "log_level": log_level}
    given = {name: value for name, value in server.items() if value is not None}
    if given:
        flags["server"] = given
    if policy is not None:
        flags["scheduler"] = {"policy": policy}
    if log_format is not None:
        flags["telemetry"] = {"log_format": log_format}
    try:
        if model:
            flags["models"] = [{"model": item} for item in model]
        if upstream:
            pairs = [_pair(item, "--upstream", "NAME=URL") for item in upstream]
            flags["upstreams"] = _upstreams(pairs)
        if alias:
            flags["aliases"] = dict(_pair(item, "--alias", "ALIAS=MODEL") for item in alias)

        def read() -> SettingsSources:
            return _sources(flags, config, lora or ())

        sources = read()
        settings = sources.settings()
        if check:
            raise typer.Exit(_check(sources, settings))
        check_exposure(settings)
        check_targets(sources, settings)

        with _quick_imports():
            from parrot_gateway.server.serve import run_server

        status = run_server(
            settings, announce=_announce, report=_complain, sources=sources, read=read
        )
    except ConfigError as error:
        _complain(str(error))
        raise typer.Exit(2) from None
    raise typer.Exit(status)


@app.command(**PASS_ON)
def engine(context: typer.Context) -> None:
    """Run one engine: --join URL for a gateway, --listen on its own (see engine --help)."""
    become("parrot_engine", context)


@app.command()
def doctor() -> None:
    """Show what this machine can do, what is missing, and how to get it."""
    from parrot_gateway.cli.doctor import examine, show

    findings = examine()
    show(findings)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    from parrot_gateway.settings.config_file import ConfigError

    name, separator, value = text.partition("=")
    if not (separator and name and value):
        raise ConfigError(f"{option} {text!r}: expected {form}")
    return name, value


def _sources(flags: dict[str, Any], config: Path | None, lora: Sequence[str]) -> SettingsSources:
    """Read the current settings; with no model or upstream named, add the demo model."""
    from parrot_gateway.settings import DEMO_MODEL
    from parrot_gateway.settings.sources import SettingsSources

    sources = SettingsSources.read(flags, config)
    settings = sources.settings()
    if not (settings.models or settings.upstreams or settings.engines.join_key):
        sources = SettingsSources.read({**flags, "models": [{"model": DEMO_MODEL}]}, config)
        settings = sources.settings()
    if lora:
        adapted = _with_adapters(settings.models, lora)
        sources = SettingsSources.read({**flags, "models": [adapted]}, config)
    return sources


def _check(sources: SettingsSources, settings: Settings) -> int:
    """Print what would be served and what is wrong; return the exit status."""
    from parrot_gateway.server.check import check_settings

    checked = check_settings(sources, settings)
    for line in checked.served:
        typer.echo(line)
    for warning in checked.warnings:
        typer.secho(f"warning: {warning}", err=True, fg=typer.colors.YELLOW)
    for problem in checked.problems:
        _complain(problem)
    return 2 if checked.problems else 0


def _with_adapters(models: Sequence[ModelSettings], lora: Sequence[str]) -> dict[str, Any]:
    """Return the settings' only model, with adapters from the command line."""
    from parrot_gateway.settings.config_file import ConfigError

    if len(models) != 1:
        raise ConfigError(
            f"--lora: {len(models)} models are run; name the adapters as `adapters` of one in the "
            "settings"
        )
    adapters = dict(_pair(item, "--lora", "NAME=PATH") for item in lora)
    model = models[0]
    return {**model.model_dump(exclude_unset=True), "adapters": {**model.adapters, **adapters}}


def _upstreams(pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return settings of upstreams; a name with several URLs has several servers."""
    urls: dict[str, list[str]] = {}
    for name, url in pairs:
        urls.setdefault(name, []).append(url)
    return [
        {"name": name, "urls": given} if len(given) > 1 else {"name": name, "url": given[0]}
        for name, given in urls.items()
    ]


def _complain(text: str) -> None:
    typer.secho(text, err=True, fg=typer.colors.RED)


def _example(model: str, gateway: Gateway) -> tuple[str, str]:
    """Return path and body of an example call for the model."""
    engines = gateway.models.engines_for(model)
    pooling = engines[0].info.pooling if engines and not engines[0].info.generates else None
    if pooling is None:
        return (
            "completions",
            f'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 60}}',
        )
    if pooling.task == "embed":
        return "embeddings", f'{{"model": "{model}", "input": "Once upon a time"}}'
    documents = '"documents": ["Paris is in France.", "Fish swim."]'
    return "rerank", f'{{"model": "{model}", "query": "Where is Paris?", {documents}}}'


def _announce(gateway: Gateway, base_url: str, elapsed_s: float) -> None:
    """Print the base URL, the models, failed ones, and lines to paste."""
    from parrot_gateway.settings import DEMO_MODEL
    from parrot_gateway.settings.model import api_key_of

    failures = gateway.failures()
    served = [name for name in gateway.models.engine_models() if name not in failures]
    names = [*served]
    for upstream in gateway.upstreams.values():
        served += upstream.models()
        names += [f"{name}  (upstream {upstream.name})" for name in upstream.models()]
        if upstream.serves_any():
            names.append(f"any other name  (upstream {upstream.name})")
        elif not upstream.ready:
            names.append(f"(upstream {upstream.name} has not listed its models yet)")
    if gateway.upstreams and not gateway.supervisor.models():
        names.append(f"({DEMO_MODEL} is not run beside upstreams: --model {DEMO_MODEL} adds it)")
    if gateway.remote_join_key is not None and not names:
        join_url = base_url.replace("http", "ws", 1) + "/engines/join"
        names = [f"(none before an engine joins at {join_url})"]
    first = served[0] if served else "MODEL"
    reference = gateway.settings.server.api_key or "env:PARROT_API_KEY"
    kind, _, place = reference.partition(":")
    shown = f"${place}" if kind == "env" else f"$(cat {shlex.quote(place)})"
    key = f' -H "Authorization: Bearer {shown}"' if api_key_of(gateway.settings) else ""
    path, body = _example(first, gateway)
    lost = set(gateway.models.dangling())
    lines = [
        f"Parrot Gateway {__version__} is ready at {base_url}  ({elapsed_s:.1f} s)",
        f"see it live: {base_url.removesuffix('/v1')}/ui",
        "",
        "models:",
        *(f"  {name}" for name in names[:20]),
        *([f"  … and {len(names) - 20} more"] if len(names) > 20 else []),
        *(
            f"  {name} -> {to}" + ("  (not served so far)" if name in lost else "")
            for name, to in gateway.settings.aliases.items()
        ),
        *(["", "not served:"] if failures else []),
        *(f"  {name}: {reason}" for name, reason in failures.items()),
        "",
        "try:",
        f"  export OPENAI_BASE_URL={base_url}",
        *([f'  export OPENAI_API_KEY="{shown}"'] if key else []),
        f"  curl {base_url}/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        "",
    ]
    # One write, so that no other line comes between.
    typer.echo("\n".join(lines))
    sys.stdout.flush()
