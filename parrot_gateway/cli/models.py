"""`parrot-gateway models list | pull | load | unload`: the models of a running gateway.

They call its admin routes; `pull` also works without a gateway, on this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from parrot_gateway.cli.admin_client import (
    AdminKey,
    BaseUrl,
    CommandFailedError,
    Config,
    Gateway,
    aligned,
    or_exit,
    run,
)
from parrot_gateway.cli.commands import PASS_ON, become

if TYPE_CHECKING:
    from rich.progress import Progress

Model = Annotated[str, typer.Argument(help="Hub id, folder, or name of a model.")]
_PATH = "/admin/v1/models"

models = typer.Typer(help="Models of own engines, at run time.", no_args_is_help=True)


@models.command("supported", **PASS_ON)
def supported_command(context: typer.Context) -> None:
    """List families of models and formats of weights that the builtin engine loads."""
    become("parrot_engine.models.supported", context)


@models.command("list")
def list_command(
    base_url: BaseUrl = None,
    admin_key: AdminKey = None,
    config: Config = None,
    json: Annotated[bool, typer.Option("--json", help="All fields, as JSON.")] = False,
) -> None:
    """List the models of a gateway's own engines, with states, devices and memory."""

    async def show(gateway: Gateway) -> None:
        found = await gateway.get(_PATH)
        if json:
            typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        else:
            typer.echo(list_text(found, time.time()))

    run(base_url, admin_key, config, show)


@models.command("load")
def load_command(
    model: Model,
    name: Annotated[str | None, typer.Option(help="The name that clients use.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SETTING=VALUE",
            help="A setting of the model, as in the settings file: memory_share=0.4; repeatable.",
        ),
    ] = None,
    base_url: BaseUrl = None,
    admin_key: AdminKey = None,
    config: Config = None,
) -> None:
    """Load a model into a running gateway, downloading it first if need be."""
    body: dict[str, Any] = {"model": model} if name is None else {"model": model, "name": name}
    body |= dict(map(_setting, setting or ()))

    async def load(gateway: Gateway) -> None:
        last: dict[str, Any] = {}
        with _progress() as progress:
            task = progress.add_task(f"loading {model}", total=None)
            async for last in gateway.events(f"{_PATH}/load", body):
                if last.get("download"):
                    _show(progress, task, f"downloading {last['model']}", last["download"])
                else:
                    lines = [each["progress"] for each in last["engines"] if each["progress"]]
                    progress.update(task, description=(lines or [f"loading {model}"])[0])
        typer.echo(list_text({"data": [last], "downloads": []}, time.time()))

    run(base_url, admin_key, config, load)


@models.command("unload")
def unload_command(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    base_url: BaseUrl = None,
    admin_key: AdminKey = None,
    config: Config = None,
) -> None:
    """Unload a model from a running gateway, once its calls have finished or had time to."""

    async def unload(gateway: Gateway) -> None:
        answer = await gateway.post(f"{_PATH}/unload", {"model": model})
        cut_off = answer["cut_off"]
        typer.echo(f"{model} is unloaded" + (f"; {cut_off} calls were cut off" if cut_off else ""))

    run(base_url, admin_key, config, unload)


@models.command("pull")
def pull_command(
    model: Annotated[str, typer.Argument(help="Hub id, such as Qwen/Qwen3-0.6B.")],
    base_url: Annotated[
        str | None, typer.Option(help="Let this gateway download it, on its machine.")
    ] = None,
    admin_key: AdminKey = None,
    config: Config = None,
) -> None:
    """Download a model from the Hugging Face hub; what is there already is kept."""

    async def show(source: AsyncIterator[dict[str, Any]]) -> None:
        last: dict[str, Any] = {}
        with _progress() as progress:
            task = progress.add_task(f"downloading {model}", total=None)
            async for last in source:
                _show(progress, task, f"downloading {model}", last)
        typer.echo(f"{model} is at {last['path']}")

    if base_url is None and config is None:
        or_exit(lambda: asyncio.run(show(_pull_here(model))))
    else:
        run(
            base_url, admin_key, config,
            lambda gateway: show(gateway.events(f"{_PATH}/pull", {"model": model})),
        )  # fmt: skip


async def _pull_here(model: str) -> AsyncIterator[dict[str, Any]]:
    """Yield the states of a download on this machine."""
    from parrot_gateway.backends.own.changes import wait_for_change
    from parrot_gateway.backends.own.downloads import Downloads
    from parrot_gateway.exceptions import GatewayError
    from parrot_gateway.settings.model import EngineLinkSettings

    downloads = Downloads(1, EngineLinkSettings().max_download_bytes)
    download = downloads.start(model)
    ended = asyncio.create_task(download.ended())
    try:
        while not ended.done():
            await wait_for_change([downloads.changes.next()], ended)
            yield download.describe()
        ended.result()
    except GatewayError as error:
        raise CommandFailedError(error.message) from None
    finally:
        ended.cancel()
        await downloads.close()


def list_text(found: dict[str, Any], now: float) -> str:
    """Format one line per model and per unfinished download."""
    lines = aligned([_cells(entry, now) for entry in found["data"]])
    lines += [f"    {entry['reason']}" for entry in found["data"] if entry["reason"]]
    for download in found["downloads"]:
        if download["state"] in ("waiting", "downloading"):
            total = _bytes(download["total_bytes"] or 0)
            lines.append(
                f"downloading {download['model']}: {_bytes(download['done_bytes'])} of {total}"
            )
    return "\n".join(lines) or "no models"


def _cells(entry: dict[str, Any], now: float) -> list[str]:
    engines = entry["engines"]
    joined = [engine for engine in engines if engine["memory"]]
    devices = dict.fromkeys(f"{engine['kind']} on {engine['device']}" for engine in joined)
    memory = ""
    if joined:
        weights = sum(engine["memory"]["weight_bytes"] for engine in joined)
        cache = sum(engine["memory"]["kv_cache_bytes"] for engine in joined)
        tokens = sum(engine["memory"]["kv_tokens"] for engine in joined)
        memory = f"{_bytes(weights)} weights"
        if cache:
            memory += f", {_bytes(cache)} KV ({tokens:,} tokens)"
    since = "" if entry["since"] is None else f"for {_age(now - entry['since'])}"
    count = f"{len(engines)} engines, " if len(engines) > 1 else ""
    source = "" if entry["model"] == entry["id"] else f"from {entry['model']}"
    return [entry["id"], entry["state"], since, count + ", ".join(devices), memory, source]


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TransferSpeedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _show(progress: Progress, task: Any, description: str, download: dict[str, Any]) -> None:
    progress.update(
        task,
        description=description,
        completed=download["done_bytes"],
        total=download["total_bytes"],
    )


def _setting(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not (separator and name):
        raise typer.BadParameter(f"{text!r}: expected SETTING=VALUE", param_hint="--set")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value
