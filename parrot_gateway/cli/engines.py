"""`parrot-gateway engines list | drain | undrain`: engines and servers of a running gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from parrot_gateway.cli.admin_client import AdminKey, BaseUrl, Config, Gateway, aligned, run

_PATH = "/admin/v1/engines"

Engine = Annotated[
    str | None,
    typer.Argument(help="Id or name of an engine, of an upstream's server, or of an upstream."),
]
All = Annotated[bool, typer.Option("--all", help="The whole gateway instead of one engine.")]

engines = typer.Typer(
    help="Engines and servers of upstreams: listed, drained, given calls again.",
    no_args_is_help=True,
)


@engines.command("list")
def list_command(
    base_url: BaseUrl = None,
    admin_key: AdminKey = None,
    config: Config = None,
    json: Annotated[bool, typer.Option("--json", help="All fields, as JSON.")] = False,
) -> None:
    """List engines that joined and servers of upstreams, with their states."""

    async def show(gateway: Gateway) -> None:
        found = await gateway.get(_PATH)
        if json:
            typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        else:
            typer.echo(list_text(found["data"]) or "no engines")

    run(base_url, admin_key, config, show)


@engines.command("drain")
def drain_command(
    engine: Engine = None,
    whole: All = False,
    base_url: BaseUrl = None,
    admin_key: AdminKey = None,
    config: Config = None,
) -> None:
    """Give an engine no new calls; what it runs goes on."""
    _set_drained("drain", engine, whole, base_url, admin_key, config)


@engines.command("undrain")
def undrain_command(
    engine: Engine = None,
    whole: All = False,
    base_url: BaseUrl = None,
    admin_key: AdminKey = None,
    config: Config = None,
) -> None:
    """Give a drained engine calls again."""
    _set_drained("undrain", engine, whole, base_url, admin_key, config)


def _set_drained(
    what: str,
    engine: str | None,
    whole: bool,
    base_url: str | None,
    admin_key: str | None,
    config: Path | None,
) -> None:
    if (engine is None) != whole:
        raise typer.BadParameter("name an engine, or --all", param_hint="ENGINE")

    async def change(gateway: Gateway) -> None:
        if engine is None:
            answer = await gateway.post(f"/admin/v1/{what}", {})
            if answer["drained"]:
                typer.echo(
                    f"the gateway is drained, with {answer['running']} calls running; new ones "
                    f"are refused in {answer['refuses_in_s']:g} s"
                )
            else:
                typer.echo("the gateway takes calls")
        else:
            answer = await gateway.post(f"{_PATH}/{quote(engine, safe='')}/{what}", {})
            typer.echo(list_text(answer["data"]))

    run(base_url, admin_key, config, change)


def list_text(entries: list[dict[str, Any]]) -> str:
    """Format one line per entry."""
    return "\n".join(aligned([_cells(entry) for entry in entries]))


def _cells(entry: dict[str, Any]) -> list[str]:
    name = "" if entry["name"] == entry["id"] else entry["name"]
    running = f"{entry['running']} running"
    return [entry["id"], name, entry["kind"], entry["state"], running, entry["model"]]
