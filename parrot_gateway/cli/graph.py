"""`parrot-gateway graph [SESSION]`: fetches a session's graph from a running gateway and draws it.

Without a name it takes the last used session; `--list` lists all.

The gateway answers with plain data, and `semantic.drawing` makes the pictures here.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import msgspec
import typer

from parrot_gateway.semantic.drawing import to_mermaid, to_text
from parrot_gateway.semantic.drawing.labels import clip
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot, LinkView, NodeView, VariableView

#: Width of a drawing for a file or pipe, which have no width of their own.
_PIPE_WIDTH = 1000
DEFAULT_BASE_URL = "http://127.0.0.1:8000/v1"

BaseUrl = Annotated[
    str | None,
    typer.Option(help="The gateway.", show_default=f"OPENAI_BASE_URL, else {DEFAULT_BASE_URL}"),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="env:NAME",
        help="Environment variable with the key; PARROT_API_KEY is read without this, and "
        "OPENAI_API_KEY where OPENAI_BASE_URL is set.",
    ),
]
TIMEOUT_S = 15.0
WATCH_INTERVAL_S = 0.5
#: Sessions listed above the graph by `--live`.
_LIVE_SESSIONS = 8
#: Successors named in a line of `--profiles`.
_SHOWN_SUCCESSORS = 3
#: Minimum lines of the graph below them, even in a smaller terminal.
_LEAST_GRAPH = 6
#: Cells for a session's model names.
_MAX_MODELS = 40

V = TypeVar("V", NodeView, VariableView)
L = TypeVar("L")


class GraphUnavailableError(Exception):
    """The graph cannot be fetched; the message names the reason and the remedy."""


class Format(StrEnum):
    TEXT = "text"
    MERMAID = "mermaid"
    JSON = "json"


#: Ending of inferred sessions' titles.
_TITLE_DIGITS = re.compile(r"[0-9a-f]{6}")
#: Fields of `NodeView` with another name in JSON.
_RENAMED = {
    "transform": "detail",
    "submitted_s": "submitted",
    "started_s": "started",
    "first_token_s": "first_token",
    "finished_s": "finished",
}


class _Session(msgspec.Struct):
    id: str
    name: str = ""


class NumCalls(msgspec.Struct):
    unfinished: int = 0
    finished: int = 0


class ListedSession(_Session):
    title: str = ""
    inferred: bool = False
    last_used: float = 0.0
    variables: int = 0
    models: list[str] = msgspec.field(default_factory=list)
    calls: NumCalls = msgspec.field(default_factory=NumCalls)


class Sessions(msgspec.Struct):
    data: list[ListedSession]
    has_more: bool = False


class Quantiles(msgspec.Struct):
    p50: float = 0.0
    p90: float = 0.0


class Successor(msgspec.Struct):
    template: str
    probability: float
    fan_out: float


class Profile(msgspec.Struct):
    template: str
    prefix_bytes: int
    calls: float
    output_tokens: Quantiles
    gap_s: Quantiles
    returns: float
    feeds_fan_in: float
    fan_in: float
    successors: list[Successor]


class _Profiles(msgspec.Struct):
    data: list[Profile]


class _Link(msgspec.Struct, rename={"source": "from", "target": "to"}):
    source: str
    target: str
    kind: str
    confidence: float


class _Graph(msgspec.Struct):
    session: _Session
    calls: list[dict[str, Any]]
    variables: list[dict[str, Any]]
    links: list[_Link] = msgspec.field(default_factory=list)
    inferred: bool = False
    duration_s: float = 0.0
    calls_not_kept: int = 0


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Error(msgspec.Struct):
    error: _ErrorDetail


def read_graph(data: bytes) -> GraphSnapshot:
    """Parse the graph that `semantic.drawing.to_json` wrote; its clock begins at 0.

    Raises:
        GraphUnavailableError: the data is something else.
    """
    try:
        graph = msgspec.json.decode(data, type=_Graph)
        nodes = tuple(_view(node, NodeView) for node in graph.calls)
        variables = tuple(_view(variable, VariableView) for variable in graph.variables)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise GraphUnavailableError(f"The answer is not a graph: {error}") from None
    return GraphSnapshot(
        session_id=graph.session.id,
        session_name=graph.session.name,
        # NOTE: if a node is unfinished the duration ends now; otherwise "now" does not matter.
        taken_at=graph.duration_s,
        nodes=nodes,
        variables=variables,
        pruned=graph.calls_not_kept,
        links=tuple(
            LinkView(each.source, each.target, each.kind, each.confidence) for each in graph.links
        ),
        inferred=graph.inferred,
    )


def _view(plain: dict[str, Any], kind: type[V]) -> V:
    """Build a node or variable; null means the default."""
    fields = {_RENAMED.get(name, name): v for name, v in plain.items() if v is not None}
    return msgspec.convert(fields, kind)


async def fetch_graph(base_url: str, session: str, api_key: str | None) -> bytes:
    """Fetch the graph of a session as JSON.

    Args:
        base_url: of the gateway, ending in `/v1`.
        session: its id or its name.
        api_key: sent when given.

    Raises:
        GraphUnavailableError: no gateway there, an unknown session, a wrong key, or another error.
    """
    path = f"/sessions/{quote(session, safe='')}/graph"
    status, data = await fetch(base_url, path, api_key)
    if status != 200:
        raise GraphUnavailableError(refusal(status, data, base_url, session))
    return data


async def fetch_sessions(base_url: str, api_key: str | None) -> Sessions:
    """Fetch the sessions, last used first; arguments and errors are those of `fetch_graph`."""
    return await _fetch_list(base_url, "/sessions", api_key, Sessions, "list of sessions")


async def fetch_profiles(base_url: str, api_key: str | None) -> list[Profile]:
    """Fetch the profiles of templates; arguments and errors are those of `fetch_graph`."""
    path = "/linking/profiles"
    return (await _fetch_list(base_url, path, api_key, _Profiles, "list of profiles")).data


async def _fetch_list(base_url: str, path: str, api_key: str | None, kind: type[L], what: str) -> L:
    status, data = await fetch(base_url, path, api_key)
    if status != 200:
        raise GraphUnavailableError(refusal(status, data, base_url, "", what))
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise GraphUnavailableError(f"The answer is no {what}: {error}") from None


def profiles_text(profiles: Sequence[Profile]) -> str:
    """Format one line per template, ending in a line end."""
    lines = [
        f"{'template':16} {'bytes':>6} {'calls':>6}  {'tokens p50 p90':>14}  {'gap s p50 p90':>14} "
        f"{'returns':>8} {'fan-in':>12}  successors"
    ]
    for each in profiles:
        tokens = f"{each.output_tokens.p50:.0f} {each.output_tokens.p90:.0f}"
        gap = f"{each.gap_s.p50:.1f} {each.gap_s.p90:.1f}" if each.gap_s.p90 else "-"
        fan_in = f"{each.feeds_fan_in:.0%} of {each.fan_in:.1f}" if each.feeds_fan_in else "-"
        successors = ", ".join(
            f"{next_.template} {next_.probability:.0%} x{next_.fan_out:.1f}"
            for next_ in each.successors[:_SHOWN_SUCCESSORS]
        )
        lines.append(
            f"{each.template:16} {each.prefix_bytes:6} {each.calls:6.0f}  {tokens:>14}  {gap:>14} "
            f"{each.returns:>8.0%} {fan_in:>12}  {successors or '-'}"
        )
    return "\n".join(lines if profiles else ["no profiles"]) + "\n"


async def _last_session(base_url: str, api_key: str | None) -> str:
    """Return the id of the last used session; a hint at the others goes to standard error."""
    sessions = await fetch_sessions(base_url, api_key)
    if not sessions.data:
        raise GraphUnavailableError(
            f"{base_url} has no sessions yet. They are inferred from calls, made by calls that "
            "name one (X-Parrot-Session, x-session-id, traceparent, …) or are deferred, and by "
            "langchain_parrot."
        )
    if len(sessions.data) > 1:
        count = f"{len(sessions.data)}{'+' if sessions.has_more else ''}"
        typer.secho(f"The last of {count} sessions; --list shows all.", err=True, dim=True)
    return sessions.data[0].id


async def _full_id(base_url: str, session: str, api_key: str | None) -> str:
    """Resolve the digits at the end of a title to an id; other names stay."""
    if not _TITLE_DIGITS.fullmatch(session):
        return session
    listed = (await fetch_sessions(base_url, api_key)).data
    found = [each.id for each in listed if each.id.startswith(f"sess_{session}")]
    is_name = any(each.name == session for each in listed)
    return found[0] if len(found) == 1 and not is_name else session


def list_text(sessions: Sessions, now: float) -> str:
    """Format one line per session, ending in a line end."""
    lines = []
    for each in sessions.data:
        ago = max(0.0, now - each.last_used)
        age = f"{ago:.0f} s" if ago < 120 else f"{ago / 60:.0f} min"
        calls = each.calls.finished + each.calls.unfinished
        running = f", {each.calls.unfinished} unfinished" if each.calls.unfinished else ""
        lines.append(
            f"{each.title if each.inferred else each.name}  ·  "
            f"{calls} call{'' if calls == 1 else 's'}{running}  ·  {age} ago"
            f"{f'  ·  inferred, {each.id}' if each.inferred else ''}"
            f"{f'  ·  {clip(model, _MAX_MODELS)}' if (model := ', '.join(each.models)) else ''}"
        )
    if sessions.has_more:
        lines.append("… and older ones")
    return "\n".join(lines or ["no sessions"]) + "\n"


async def fetch(base_url: str, path: str, api_key: str | None) -> tuple[int, bytes]:
    """Return status and body of a GET."""
    # Imported here to keep the command line's start fast.
    import aiohttp

    headers = {"Accept": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.get(f"{base_url.rstrip('/')}{path}", headers=headers) as response,
        ):
            return response.status, await response.read()
    except TimeoutError:
        raise GraphUnavailableError(f"{base_url} did not answer within {TIMEOUT_S:g} s.") from None
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, ValueError):
        raise GraphUnavailableError(
            f"--base-url {base_url!r} is not a URL; it looks like {DEFAULT_BASE_URL}."
        ) from None
    except aiohttp.ClientError as error:
        reason = getattr(error, "os_error", None) or error
        raise GraphUnavailableError(
            f"No gateway answers at {base_url} ({reason}). Start one with parrot-gateway serve, or "
            "say where it is: --base-url URL, or the variable OPENAI_BASE_URL."
        ) from None


def refusal(status: int, data: bytes, base_url: str, session: str, listed: str = "") -> str:
    """Word the refusal of a session's graph, or of `listed` if no session is named."""
    try:
        detail = msgspec.json.decode(data, type=_Error).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        detail = _ErrorDetail()
    if status in (401, 403):
        return (
            f"{base_url} wants a key, or another one than it got: set PARROT_API_KEY, or name the "
            "environment variable that holds the right one: --api-key env:NAME."
        )
    if status == 404 and detail.code == "session_not_found":
        return (
            f"{base_url} knows no session '{session}': it was never used, has expired, or belongs "
            "to another key."
        )
    reason = detail.message or data[:200].decode("utf-8", "replace")
    what = f"graph for '{session}'" if session else listed
    return f"{base_url} has no {what} (status {status}): {reason}"


def draw(data: bytes, form: Format, width: int) -> str:
    """Render a graph as the command prints it, ending in a line end.

    Raises:
        GraphUnavailableError: the data is no graph.
    """
    if form is Format.JSON:
        read_graph(data)
        return msgspec.json.format(data, indent=2).decode() + "\n"
    snapshot = read_graph(data)
    if form is Format.TEXT:
        return to_text(snapshot, width)
    return to_mermaid(snapshot)


def graph_command(
    session: Annotated[
        str | None,
        typer.Argument(
            help="Name or id of the session, or the digits at the end of its title.",
            show_default="the one used last",
        ),
    ] = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    form: Annotated[Format, typer.Option("--format", help="What to print.")] = Format.TEXT,
    watch: Annotated[
        bool, typer.Option("--watch", help="Draw again until every call has ended.")
    ] = False,
    live: Annotated[
        bool,
        typer.Option("--live", help="Follow the sessions: their list and the graph used last."),
    ] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="List the sessions instead, last used first.")
    ] = False,
    profiles: Annotated[
        bool, typer.Option("--profiles", help="List what calls of each template do instead.")
    ] = False,
) -> None:
    """Draw a session's graph: its calls, their states and times."""
    from parrot_gateway.settings.config_file import ConfigError
    from parrot_gateway.settings.secret_reference import key_of_option, usual_key

    if list_all and (session is not None or watch or live or form is not Format.TEXT):
        raise typer.BadParameter("goes without other options", param_hint="--list")
    if profiles and (list_all or session is not None or watch or live or form is not Format.TEXT):
        raise typer.BadParameter("goes without other options", param_hint="--profiles")
    if live and (watch or form is not Format.TEXT):
        raise typer.BadParameter("goes with a session at most", param_hint="--live")
    if watch and form is not Format.TEXT:
        raise typer.BadParameter("goes with --format text only", param_hint="--watch")
    try:
        key = key_of_option(api_key) if api_key else usual_key(base_url)
        target = base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL
        if list_all or profiles:
            if profiles:
                text = profiles_text(asyncio.run(fetch_profiles(target, key)))
            else:
                text = list_text(asyncio.run(fetch_sessions(target, key)), time.time())
            sys.stdout.buffer.write(text.encode())
            sys.stdout.buffer.flush()
            return
        if live:
            asyncio.run(_follow(target, session, key))
            return
        if session is None:
            session = asyncio.run(_last_session(target, key))
        else:
            session = asyncio.run(_full_id(target, session, key))
        if watch:
            asyncio.run(_watch(target, session, key))
            return
        data = asyncio.run(fetch_graph(target, session, key))
        # NOTE: UTF-8 in any locale, because pictures are redirected into files.
        sys.stdout.buffer.write(draw(data, form, _width()).encode())
        sys.stdout.buffer.flush()
    except (GraphUnavailableError, ConfigError) as error:
        typer.secho(str(error), err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _width() -> int:
    """Return the columns of a drawing that is written once."""
    from rich.console import Console

    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return _PIPE_WIDTH
    return Console().width


async def _watch(base_url: str, session: str, api_key: str | None) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            snapshot = read_graph(await fetch_graph(base_url, session, api_key))
            text = Text(to_text(snapshot, console.width), no_wrap=True, end="")
            live.update(text, refresh=True)
            if all(node.finished is not None for node in snapshot.nodes):
                return
            await asyncio.sleep(WATCH_INTERVAL_S)


async def _follow(base_url: str, session: str | None, api_key: str | None) -> None:
    """Draw the list of sessions and one graph repeatedly until interrupted.

    For a file or pipe, each session's graph is written whenever calls began or ended.

    Args:
        session: None for the one last used at each time.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        await _follow_in_lines(base_url, session, api_key)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            sessions = await fetch_sessions(base_url, api_key)
            sessions.has_more = sessions.has_more or len(sessions.data) > _LIVE_SESSIONS
            shown = session or (sessions.data[0].id if sessions.data else None)
            del sessions.data[_LIVE_SESSIONS:]
            text = list_text(sessions, time.time())
            if shown is not None:
                snapshot = read_graph(await fetch_graph(base_url, shown, api_key))
                room = console.height - text.count("\n") - 1
                text += "\n" + to_text(snapshot, console.width, max(room, _LEAST_GRAPH))
            live.update(Text(text, no_wrap=True, end=""), refresh=True)
            await asyncio.sleep(WATCH_INTERVAL_S)


async def _follow_in_lines(base_url: str, session: str | None, api_key: str | None) -> None:
    """Do the work of `_follow` for a file or pipe; merged sessions are not written again."""
    written: dict[str, tuple[int, int]] = {}
    while True:
        sessions = await fetch_sessions(base_url, api_key)
        counts = {each.id: (each.calls.unfinished, each.calls.finished) for each in sessions.data}
        named = {session} if session else set(counts)
        for each in reversed(sessions.data):
            if (
                not named.isdisjoint({each.id, each.name})
                and written.get(each.id) != (counts[each.id])
            ):
                snapshot = read_graph(await fetch_graph(base_url, each.id, api_key))
                sys.stdout.buffer.write(f"{to_text(snapshot, _width())}\n".encode())
        sys.stdout.buffer.flush()
        written = counts
        await asyncio.sleep(WATCH_INTERVAL_S)
