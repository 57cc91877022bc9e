"""`parrot-gateway explain CALL`: a sentence on why a call ran when and where it did."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from parrot_gateway.cli.graph import (
    DEFAULT_BASE_URL,
    ApiKey,
    BaseUrl,
    GraphUnavailableError,
    fetch,
    fetch_graph,
    read_graph,
    refusal,
)


def explain_command(
    call: Annotated[
        str | None,
        typer.Argument(help="Id of a call, or the x-request-id or response id of its answer."),
    ] = None,
    session: Annotated[
        str | None, typer.Option(metavar="ID|NAME", help="Explain all calls of a session.")
    ] = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    json: Annotated[bool, typer.Option("--json", help="All figures, as JSON.")] = False,
) -> None:
    """Tell why a call ran when and where it did, and what it would have taken elsewhere."""
    from parrot_gateway.settings.config_file import ConfigError
    from parrot_gateway.settings.secret_reference import key_of_option, usual_key

    if (call is None) == (session is None):
        raise typer.BadParameter("name a call, or --session", param_hint="CALL")
    target = base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL
    try:
        key = key_of_option(api_key) if api_key else usual_key(base_url)
        if call is not None:
            typer.echo(asyncio.run(_explain_call(target, call, key, as_json=json)))
            return
        assert session is not None
        data = asyncio.run(fetch_graph(target, session, key))
        typer.echo(_json_of(data) if json else _session_text(data))
    except (GraphUnavailableError, ConfigError) as error:
        typer.secho(str(error), err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from None


async def _explain_call(base_url: str, call: str, api_key: str | None, *, as_json: bool) -> str:
    status, data = await fetch(base_url, f"/calls/{quote(call, safe='')}", api_key)
    if status == 404:
        raise GraphUnavailableError(
            f"{base_url} knows no call '{call}': it was never made there, is too long ago, or "
            "belongs to another key."
        )
    if status != 200:
        raise GraphUnavailableError(refusal(status, data, base_url, "", f"call '{call}'"))
    try:
        described: dict[str, Any] = msgspec.json.decode(data, type=dict)
    except msgspec.MsgspecError as error:
        raise GraphUnavailableError(f"The answer is no call: {error}") from None
    explanation = described.get("explanation")
    if explanation is None:
        raise GraphUnavailableError(
            f"Why '{call}' ran where it did is not known: it is too long ago, it went to an "
            "upstream of one server, or scheduler.explain_calls is off."
        )
    return _json_of(msgspec.json.encode(explanation)) if as_json else explanation["text"]


def _session_text(data: bytes) -> str:
    """Format one line per call of a graph with a known explanation."""
    nodes = [node for node in read_graph(data).nodes if node.explanation]
    return "\n".join(f"{node.name}: {node.explanation}" for node in nodes) or "no calls"


def _json_of(data: bytes) -> str:
    return msgspec.json.format(data, indent=2).decode()
