"""`parrot-gateway import FILE`: converts the settings of a LiteLLM proxy to this gateway's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from parrot_gateway.settings.config_file import ConfigFile
    from parrot_gateway.settings.litellm import Conversion, Remark


def import_command(
    file: Annotated[Path, typer.Argument(help="Configuration of a LiteLLM proxy, YAML.")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the settings there, not to stdout; a new file."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with status 1 if anything is not carried over.")
    ] = False,
) -> None:
    """Turn a LiteLLM proxy's config into settings, and list what cannot be carried over."""
    from parrot_gateway.settings.config_file import ConfigError, ConfigFile
    from parrot_gateway.settings.litellm import convert

    try:
        source = ConfigFile.read(file)
        found = convert(source.data, os.environ)
        text = settings_text(found, file.name)
        if output is None:
            typer.echo(text, nl=False)
        else:
            try:
                with output.open("x", encoding="utf-8") as target:
                    target.write(text)
            except OSError as error:
                raise ConfigError(f"{output}: cannot be written: {error.strerror}") from None
    except ConfigError as error:
        typer.secho(str(error), err=True, fg=typer.colors.RED)
        raise typer.Exit(2) from None
    typer.echo(report_text(found, source), err=True)
    if strict and found.lost:
        raise typer.Exit(1)


def settings_text(found: Conversion, name: str) -> str:
    """Return the settings as a file for `serve --config`.

    Raises:
        ConfigError: the settings are not valid.
    """
    import yaml
    from pydantic import ValidationError

    from parrot_gateway.settings.config_file import ConfigError
    from parrot_gateway.settings.model import Settings

    try:
        Settings(**found.settings)
    except ValidationError as error:
        faults = "; ".join(str(fault["msg"]) for fault in error.errors())
        raise ConfigError(f"{name}: what it says cannot be settings here: {faults}") from None
    lines = [f"# From {name} by `parrot-gateway import`, which told what is not carried over.\n"]
    if found.variables:
        lines.append("# Set these environment variables where the gateway starts:\n")
        lines += [f"#   {variable}\n" for variable in found.variables]
    if found.settings:
        lines.append(yaml.safe_dump(found.settings, sort_keys=False, allow_unicode=True))
    return "".join(lines)


def report_text(found: Conversion, source: ConfigFile) -> str:
    """Return the report: settings that are not carried over, and variables to set."""
    number = len(found.settings.get("upstreams", ()))
    upstreams = "1 upstream" if number == 1 else f"{number} upstreams"
    parts = [f"{source.path}: {upstreams}, {len(found.lost)} not carried over."]
    if number == 0:
        parts.append("No model of it can be served: with these settings there is the demo model.")
    if found.lost:
        parts += ["", "Not carried over:"]
        lines = sorted((_line(remark, source) for remark in found.lost), key=lambda each: each[0])
        parts += [text for _, text in lines]
    if found.variables:
        parts += ["", "Variables to set where the gateway starts:"]
        parts += [f"  {name}  {where}".rstrip() for name, where in found.variables.items()]
    return "\n".join(parts)


def _line(remark: Remark, source: ConfigFile) -> tuple[int, str]:
    """Return the file's line number and the report's line for a remark."""
    number = source.locate(remark.location).rpartition(" ")[2]
    return int(number), f"  line {number}: {remark.path}: {remark.text}"
