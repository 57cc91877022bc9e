"""`parrot-gateway models list | pull | load | unload`: the models of a running gateway.

They call its admin routes; `pull` also works without a gateway, on this machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from parrot_gateway.cli.commands import PASS_ON, become
from parrot_gateway.cli.graph import DEFAULT_BASE_URL

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from rich.progress import Progress

Model = Annotated[str, typer.Argument(help="Hub id, folder, or name of a model.")]
BaseUrl = Annotated[
    str | None,
    typer.Option(
        help="The gateway.",
        show_default="PARROT_ADMIN_URL; OPENAI_BASE_URL if that is this machine, else "
        f"{DEFAULT_BASE_URL}",
    ),
]
AdminKey = Annotated[
    str | None,
    typer.Option(
        metavar="env:NAME",
        help="Environment variable with the admin key; PARROT_ADMIN_KEY is read without this. It "
        "is sent to this machine, or to an address that is named for it.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(help="Settings of the gateway: where its address and its admin key are."),
]

models = typer.Typer(help="Models of own engines, at run time.", no_args_is_help=True)


class CommandFailedError(Exception):
    """A command cannot do what it is to; the message names the reason and the remedy."""


class Gateway:
    """The admin routes of a gateway, for one command.

    Args:
        base_url: as clients have it, ending in `/v1` or not.
        key: the admin key.
    """

    def __init__(self, base_url: str, key: str | None) -> None:
        self.root = base_url.rstrip("/").removesuffix("/v1")
        self.key = key

    async def get(self, path: str) -> Any:
        """What a route answers with.

        Raises:
            CommandFailedError: it cannot be reached, or refuses.
        """
        async with self._request("GET", path, None) as response:
            return msgspec.json.decode(await response.read())

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The same of a POST."""
        async with self._request("POST", path, body) as response:
            return msgspec.json.decode(await response.read())

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a POST that streams."""
        async with self._request("POST", path, {**body, "stream": True}) as response:
            async for line in response.content:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = msgspec.json.decode(line.removeprefix(b"data: "), type=dict[str, Any])
                if "error" in event:
                    raise CommandFailedError(str(event["error"]["message"]))
                yield event

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncIterator[ClientResponse]:
        # Here, so that the command line does not wait for it.
        import aiohttp

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=15)
        url = f"{self.root}/admin/v1/models{path}"
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as client,
                # Another address than the one that was named does not get the key.
                client.request(
                    method, url, headers=headers, json=body, allow_redirects=False
                ) as response,
            ):
                if response.status in range(300, 400):
                    raise CommandFailedError(
                        f"{self.root} redirects to {response.headers.get('Location')}; if your "
                        "gateway is there, name that address: --base-url URL."
                    )
                if response.status >= 400:
                    raise CommandFailedError(_refusal(await response.read(), response.status))
                yield response
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, ValueError) as error:
            raise CommandFailedError(
                f"{self.root!r} cannot be asked ({error}); a base URL looks like "
                f"{DEFAULT_BASE_URL}."
            ) from None
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = getattr(error, "os_error", None) or error or "no answer"
            raise CommandFailedError(
                f"No gateway answers at {self.root} ({reason}). Start one with parrot-gateway "
                "serve, or say where it is: --base-url URL, or --config FILE."
            ) from None


def _refusal(data: bytes, status: int) -> str:
    try:
        return str(msgspec.json.decode(data)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError):
        return f"The answer is not one of a Parrot Gateway (status {status})."


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
        found = await gateway.get("")
        if json:
            typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        else:
            typer.echo(list_text(found, time.time()))

    _run(base_url, admin_key, config, show)


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
            async for last in gateway.events("/load", body):
                if last.get("download"):
                    _show(progress, task, f"downloading {last['model']}", last["download"])
                else:
                    lines = [each["progress"] for each in last["engines"] if each["progress"]]
                    progress.update(task, description=(lines or [f"loading {model}"])[0])
        typer.echo(list_text({"data": [last], "downloads": []}, time.time()))

    _run(base_url, admin_key, config, load)


@models.command("unload")
def unload_command(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    base_url: BaseUrl = None,
    admin_key: AdminKey = None,
    config: Config = None,
) -> None:
    """Unload a model from a running gateway, once its calls have finished or had time to."""

    async def unload(gateway: Gateway) -> None:
        answer = await gateway.post("/unload", {"model": model})
        cut_off = answer["cut_off"]
        typer.echo(f"{model} is unloaded" + (f"; {cut_off} calls were cut off" if cut_off else ""))

    _run(base_url, admin_key, config, unload)


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
        _or_exit(lambda: asyncio.run(show(_pull_here(model))))
    else:
        _run(
            base_url, admin_key, config,
            lambda gateway: show(gateway.events("/pull", {"model": model})),
        )  # fmt: skip


async def _pull_here(model: str) -> AsyncIterator[dict[str, Any]]:
    """The states of a download on this machine."""
    from parrot_gateway.engines.changes import wait_for_change
    from parrot_gateway.engines.downloads import Downloads
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
    """A line for each model and for each download that has not ended."""
    rows = [_cells(entry, now) for entry in found["data"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
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


def _run(
    base_url: str | None,
    admin_key: str | None,
    config: Path | None,
    command: Callable[[Gateway], Coroutine[Any, Any, None]],
) -> None:
    """Run a command against the gateway that was named; exit with status 1 where it fails."""
    _or_exit(lambda: asyncio.run(command(_gateway(base_url, admin_key, config))))


def _or_exit(run: Callable[[], None]) -> None:
    """Exit with status 1 and the reason where a command fails."""
    from parrot_gateway.settings.config_file import ConfigError

    try:
        run()
    except (CommandFailedError, ConfigError) as error:
        typer.secho(str(error), err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from None


def _gateway(base_url: str | None, admin_key: str | None, config: Path | None) -> Gateway:
    """The gateway that the operator means: by command line, settings, `PARROT_ADMIN_URL`, or here.

    An admin key may load models and run code: it goes to no host that only clients were pointed
    to, such as a public API in OPENAI_BASE_URL.

    Raises:
        ConfigError: settings or key cannot be read.
        CommandFailedError: nobody named the gateway for this.
    """
    from parrot_gateway.settings.model import admin_key_of
    from parrot_gateway.settings.secret_reference import key_of_option
    from parrot_gateway.settings.sources import load_settings

    key, target = os.environ.get("PARROT_ADMIN_KEY"), base_url
    if config is not None:
        settings = load_settings({}, config)
        key = admin_key_of(settings)
        host = settings.server.host
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104
        target = target or f"http://{host}:{settings.server.port}"
    if admin_key is not None:
        key = key_of_option(admin_key, "--admin-key")
    target = target or os.environ.get("PARROT_ADMIN_URL") or _of_clients()
    if key and target.startswith("http://") and not _is_here(target):
        typer.secho(
            f"The admin key goes to {target} unencrypted; https:// would protect it.",
            err=True,
            fg=typer.colors.YELLOW,
        )
    return Gateway(target, key)


def _of_clients() -> str:
    """Where clients of this machine's gateway find it.

    Raises:
        CommandFailedError: they are pointed to another host.
    """
    target = os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL
    if not _is_here(target):
        raise CommandFailedError(
            f"OPENAI_BASE_URL is {target}: clients are pointed there, and the admin key does not "
            "follow them to another host. If that gateway is yours, name it: --base-url URL, the "
            "variable PARROT_ADMIN_URL, or its settings with --config FILE."
        )
    return target


def _is_here(target: str) -> bool:
    """Whether an address is one of this machine's loopback, as the client reads it."""
    from yarl import URL

    from parrot_gateway.settings.sources import is_loopback

    try:
        return is_loopback(URL(target).host or "")
    except ValueError:
        return False
