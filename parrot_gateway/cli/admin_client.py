"""Client of a running gateway's admin routes for commands, and the options that locate the
gateway.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from parrot_gateway.cli.graph import DEFAULT_BASE_URL

if TYPE_CHECKING:
    from aiohttp import ClientResponse

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


class CommandFailedError(Exception):
    """A command failed; the message names the reason and the remedy."""


class Gateway:
    """A gateway's admin routes, for one command.

    Args:
        base_url: the URL that clients use, with or without `/v1`.
        key: the admin key.
    """

    def __init__(self, base_url: str, key: str | None) -> None:
        self.root = base_url.rstrip("/").removesuffix("/v1")
        self.key = key

    async def get(self, path: str) -> Any:
        """Get the answer of a route, given its whole path.

        Raises:
            CommandFailedError: the gateway cannot be reached, or refuses.
        """
        async with self._request("GET", path, None) as response:
            return msgspec.json.decode(await response.read())

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Post to a route in the same way."""
        async with self._request("POST", path, body) as response:
            return msgspec.json.decode(await response.read())

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a streaming POST."""
        async with self._request("POST", path, {**body, "stream": True}) as response:
            async for line in response.content:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = msgspec.json.decode(line.removeprefix(b"data: "), type=dict[str, Any])
                if "error" in event:
                    raise CommandFailedError(str(event["error"]["message"]))
                yield event

    async def follow(self, path: str) -> AsyncIterator[tuple[str, Any]]:
        """Yield the server-sent events of a GET as name and data."""
        name = ""
        async with self._request("GET", path, None) as response:
            async for line in response.content:
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    yield name, msgspec.json.decode(line[6:])

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncIterator[ClientResponse]:
        # Imported here to keep the command line's start fast.
        import aiohttp

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=15)
        url = self.root + path
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as client,
                # The key is never sent to a redirect's address.
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


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _refusal(data: bytes, status: int) -> str:
    try:
        return str(msgspec.json.decode(data)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError):
        return f"The answer is not one of a Parrot Gateway (status {status})."


def run(
    base_url: str | None,
    admin_key: str | None,
    config: Path | None,
    command: Callable[[Gateway], Coroutine[Any, Any, None]],
) -> None:
    """Run a command against the selected gateway; exit with status 1 on failure."""
    or_exit(lambda: asyncio.run(command(gateway_of(base_url, admin_key, config))))


def or_exit(work: Callable[[], None]) -> None:
    """Exit with status 1 and the reason if a command fails."""
    from parrot_gateway.settings.config_file import ConfigError

    try:
        work()
    except (CommandFailedError, ConfigError) as error:
        typer.secho(str(error), err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from None


def gateway_of(base_url: str | None, admin_key: str | None, config: Path | None) -> Gateway:
    """Select the gateway: by command line, settings, `PARROT_ADMIN_URL`, or this machine's.

    An admin key may load models and run code, so it is never sent to a host that was set for
    clients only, such as a public API in OPENAI_BASE_URL.

    Raises:
        ConfigError: settings or key cannot be read.
        CommandFailedError: no gateway was named for admin commands.
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
    """Return the address that clients of this machine use.

    Raises:
        CommandFailedError: clients are set to another host.
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
    """Return true if the client would read the address as one of this machine's loopback."""
    from yarl import URL

    from parrot_gateway.settings.sources import is_loopback

    try:
        return is_loopback(URL(target).host or "")
    except ValueError:
        return False
