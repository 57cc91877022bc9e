"""`parrot-gateway top`: engines, queues, sessions and tenants of a running gateway, in a terminal.

Reads the live page's data (`/ui/api`). On a terminal it follows changes; into a pipe it prints
everything once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from parrot_gateway.cli.admin_client import (
    AdminKey,
    BaseUrl,
    CommandFailedError,
    Config,
    Gateway,
    aligned,
    run,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

#: Minimum seconds between two pictures, and between attempts to reach a lost gateway.
_PAUSE_S = 0.2
_RETRY_S = 1.0
#: A picture is redrawn after this time without a change.
_IDLE_S = 1.0
#: Width of output into a pipe, which cuts nothing.
_PIPE_COLUMNS = 1000
#: Minimum width of output printed once; a narrower terminal wraps the lines itself.
_LEAST_COLUMNS = 80
#: Minimum characters of a name in a narrow terminal.
_LEAST_NAME = 8
#: Seconds over which rates are averaged.
_RATE_S = 5.0

_STYLES = {"draining": "yellow", "failing": "red", "lost": "red", "loading": "cyan"}


class _Order(NamedTuple):
    """A sort order of sessions."""

    name: str
    key: Callable[[dict[str, Any]], Any]


_ORDERS = (
    _Order("activity", lambda session: session["last_activity"]),
    _Order("running", lambda session: (session["running"], session["last_activity"])),
    _Order("calls", lambda session: session["calls"]),
    _Order("tokens", lambda session: session["prompt_tokens"] + session["output_tokens"]),
)


class View:
    """The state of a gateway, as lines for a terminal.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._parts: dict[str, Any] = {}
        self._sessions: dict[str, dict[str, Any]] = {}
        #: Samples of time, ended calls and their output tokens.
        self._totals: list[tuple[float, int, int]] = []
        self._order = 0
        self._is_reversed = False
        #: Reason why the picture may be stale; empty if it is current.
        self.trouble = ""

    def apply(self, event: str, data: Any) -> None:
        """Apply one event of `/ui/api/events`."""
        if event == "overview":
            self._parts = data
            self._sessions = {session["id"]: session for session in data["sessions"]}
            self._totals.clear()
        elif event == "sessions" and isinstance(data, dict):
            for session_id in data["gone"]:
                self._sessions.pop(session_id, None)
        elif event == "sessions":
            self._sessions |= {session["id"]: session for session in data}
        else:
            self._parts[event] = data
        if event in ("overview", "tenants"):
            self._note_totals()

    def press(self, key: str) -> None:
        """Handle a key: `s` changes the sort order of sessions, `r` reverses it."""
        if key == "s":
            self._order = (self._order + 1) % len(_ORDERS)
        elif key == "r":
            self._is_reversed = not self._is_reversed

    def _note_totals(self) -> None:
        now, tenants = self._clock(), self._parts["tenants"]
        calls = sum(tenant["calls"] for tenant in tenants)
        tokens = sum(tenant["output_tokens"] for tenant in tenants)
        self._totals.append((now, calls, tokens))
        while len(self._totals) > 2 and self._totals[1][0] <= now - _RATE_S:
            del self._totals[0]

    def lines(self, width: int, height: int | None) -> list[Text]:
        """Draw the picture that fits a terminal; without a height, draw everything.

        Args:
            width: columns.
            height: lines.
        """
        blocks = [
            self._engines(width),
            self._scheduler(width),
            self._tenants(width),
            self._session_lines(width),
        ]
        head = self._head()
        # Space for a blank line before each block and the line of keys.
        room = None if height is None else max(0, height - len(head) - len(blocks) - 1)
        shown = [line for block in _fitted(blocks, room) for line in (_plain(""), *block)]
        lines = [*head, *shown]
        if height is not None:
            lines = lines[: height - 1]
            lines += [_plain("") for _ in range(height - 1 - len(lines))]
            lines.append(self._foot())
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines

    def _head(self) -> list[Text]:
        parts = self._parts
        calls, sessions = parts["calls"], self._sessions.values()
        running = sum(tenant["running"] for tenant in parts["tenants"])
        active = sum(session["state"] in ("running", "waiting") for session in sessions)
        title = _plain(f"Parrot Gateway {parts['version']}", "bold")
        title.append(f"  up {_age(parts['uptime_s'] + self._clock() - parts['at'])}", "not bold")
        if parts["draining"]:
            title.append("  draining", "yellow")
        if self.trouble:
            title.append(f"  {self.trouble}", "red")
        figures = [f"{running} calls running", *self._rates()]
        figures.append(f"{active} of {len(sessions)} sessions active")
        if calls["refused"]:
            figures.append(f"{calls['refused']:,} refused")
        return [title, _plain("  ".join(figures))]

    def _rates(self) -> list[str]:
        """Return the rate of ended calls and of output tokens: engines' as generated, upstreams' at
        the end of calls.
        """
        if len(self._totals) < 2 or self._totals[-1][0] <= self._totals[0][0]:
            return []
        (began, calls_then, tokens_then), *_, (now, calls, tokens) = self._totals
        engines = [each["tokens_per_s"] for each in self._parts["engines"]]
        known = [rate for rate in engines if rate is not None]
        rate = sum(known) if known else (tokens - tokens_then) / (now - began)
        return [f"{(calls - calls_then) / (now - began):.1f} calls/s", f"{rate:,.0f} tokens/s"]

    def _engines(self, width: int) -> list[Text]:
        rows = [
            (
                each["name"],
                each["state"],
                _of(each["running"], each["max_batch_size"]),
                str(each["waiting"]),
                _percent(each["kv_used"], each["kv_total"]),
                _percent(each["prefix_hit_rate"], 1),
                "-" if each["step_ms"] is None else f"{each['step_ms']:.1f}",
                "-" if each["tokens_per_s"] is None else f"{each['tokens_per_s']:,.0f}",
            )
            for each in self._parts["engines"]
        ]
        titles = ("ENGINE", "STATE", "BATCH", "WAIT", "KV", "HITS", "STEP ms", "TOK/S")
        states = [each["state"] for each in self._parts["engines"]]
        return _table(width, titles, rows, ["", *(_STYLES.get(state, "") for state in states)])

    def _scheduler(self, width: int) -> list[Text]:
        scheduler = self._parts["scheduler"]
        queues = [
            (each["model"], str(each["waiting"]), str(each["held"]), f"{each['oldest_s']:.1f}")
            for each in scheduler["queues"]
        ]
        lines = _table(
            width, (f"QUEUE ({scheduler['policy']})", "WAIT", "HELD", "OLDEST s"), queues
        )
        now = self._clock()
        lines += [
            _plain(
                f"held {_age(now - each['since'])}: {each['application']} "
                f"({each['tasks']} calls): {each['why']}",
                "yellow",
            )
            for each in scheduler["held"]
        ]
        return lines

    def _tenants(self, width: int) -> list[Text]:
        tenants = sorted(self._parts["tenants"], key=lambda each: each["calls"], reverse=True)
        rows = [
            (
                each["tenant"],
                f"{each['calls']:,}",
                str(each["running"]),
                _short(each["prompt_tokens"]),
                _percent(each["cached_tokens"], each["prompt_tokens"]),
                _short(each["output_tokens"]),
                f"{each['errors']:,}",
            )
            for each in tenants
        ]
        return _table(
            width, ("TENANT", "CALLS", "RUN", "PROMPT", "CACHED", "OUTPUT", "ERRORS"), rows
        )

    def _session_lines(self, width: int) -> list[Text]:
        order, now = _ORDERS[self._order], self._clock()
        sessions = sorted(self._sessions.values(), key=order.key, reverse=not self._is_reversed)
        rows = [
            (
                each["title"] or each["id"],
                each["state"],
                str(each["calls"]),
                str(each["running"]),
                str(each["failed"]),
                f"{each['depth']}x{each['width']}",
                _short(each["prompt_tokens"]),
                _short(each["output_tokens"]),
                _age(max(0.0, now - each["last_activity"])),
            )
            for each in sessions
        ]
        titles = (
            f"SESSION (by {order.name})",
            "STATE", "CALLS", "RUN", "FAIL", "GRAPH", "PROMPT", "OUTPUT", "AGO",
        )  # fmt: skip
        return _table(width, titles, rows)

    def _foot(self) -> Text:
        return _plain("q quit   s sort sessions   r reverse", "dim")


def _plain(text: str, style: str = "") -> Text:
    """Make a line from names that others chose: no markup, no control characters."""
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "?" for c in text), style, no_wrap=True)


def _table(
    width: int, titles: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
) -> list[Text]:
    """Draw a line of titles and one per row: names to the left, figures to the right.

    If a line would be too long, the middle of the first column's names is left out, then the last
    columns.
    """
    table = [list(titles), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    least = min(_LEAST_NAME, widths[0])
    while len(widths) > 1 and least + sum(each + 2 for each in widths[1:]) > width:
        widths.pop()
    table = [row[: len(widths)] for row in table]
    room = max(_LEAST_NAME, width - sum(each + 2 for each in widths[1:]))
    left = 2 if "STATE" in titles else 1
    for row in table:
        row[0] = _shortened(row[0], room)
        row[left:] = [
            cell.rjust(size) for cell, size in zip(row[left:], widths[left:], strict=True)
        ]
    found = [_plain(line) for line in aligned(table)]
    found[0].stylize("bold")
    for line, style in zip(found, styles, strict=False):
        if style:
            line.stylize(style)
    return found


def _shortened(name: str, room: int) -> str:
    if len(name) <= room:
        return name
    end = (room - 1) // 2
    return f"{name[: room - 1 - end]}…{name[len(name) - end :]}"


def _fitted(blocks: list[list[Text]], room: int | None) -> list[list[Text]]:
    """Cut blocks to `room` lines in all; lines unused by short blocks go to the others."""
    if room is None:
        return blocks
    left, result = room, list(blocks)
    for number, index in enumerate(sorted(range(len(blocks)), key=lambda i: len(blocks[i]))):
        block, share = blocks[index], left // (len(blocks) - number)
        if len(block) > share:
            more = len(block) - share + 1
            rest = [_plain(f"… and {more} more", "dim")] if share > 2 else []
            result[index] = [*block[: share - len(rest)], *rest]
        left -= len(result[index])
    return result


def _of(part: int, whole: int | None) -> str:
    return str(part) if whole is None else f"{part}/{whole}"


def _percent(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{100 * part / whole:.0f} %"


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.0f}{unit}" if number >= 100 or not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.0f}T"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def top_command(
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture with everything, and end.")
    ] = False,
    base_url: BaseUrl = None,
    admin_key: AdminKey = None,
    config: Config = None,
) -> None:
    """Watch engines, queues, tenants and sessions of a running gateway."""
    follows = sys.stdout.isatty() and not once

    async def show(gateway: Gateway) -> None:
        from parrot_gateway.settings.secret_reference import usual_key

        if gateway.key is None:
            # Without an admin key the gateway shows this to callers with the ordinary key.
            gateway.key = usual_key(base_url)
        if follows:
            await _follow(gateway)
        else:
            view = View()
            view.apply("overview", await gateway.get("/ui/api/overview"))
            _print(view)

    run(base_url, admin_key, config, show)


def _print(view: View) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    width = max(console.width, _LEAST_COLUMNS) if console.is_terminal else _PIPE_COLUMNS
    for line in view.lines(width, None):
        console.print(line, soft_wrap=True)


async def _follow(gateway: Gateway) -> None:
    """Show changes until a key or Ctrl-C ends it."""
    from rich.console import Console, Group
    from rich.live import Live

    console, view, changed, ended = Console(highlight=False), View(), asyncio.Event(), False
    source = asyncio.create_task(_read(gateway, view, changed))

    def pressed(key: str) -> None:
        nonlocal ended
        ended = ended or key in ("q", "Q", "\x03")
        view.press(key)
        changed.set()

    def picture() -> RenderableType:
        return Group(*view.lines(console.width, console.height))

    source.add_done_callback(lambda _: changed.set())
    try:
        await changed.wait()
        with _keys(pressed), Live(console=console, screen=True, auto_refresh=False) as live:
            while not ended and not source.done():
                changed.clear()
                live.update(picture(), refresh=True)
                await asyncio.sleep(_PAUSE_S)
                # Redraw for growing ages and a resized terminal.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_S):
                        await changed.wait()
    finally:
        source.cancel()
        await asyncio.gather(source, return_exceptions=True)
    if source.done() and not source.cancelled() and not ended:
        source.result()


async def _read(gateway: Gateway, view: View, changed: asyncio.Event) -> None:
    """Keep the view up to date; fail if the gateway cannot be reached the first time."""
    is_known = False
    while True:
        try:
            async for event, data in gateway.follow("/ui/api/events"):
                view.apply(event, data)
                view.trouble, is_known = "", True
                changed.set()
            view.trouble = "the gateway has ended the stream"
        except CommandFailedError as error:
            if not is_known:
                raise
            view.trouble = str(error)
        changed.set()
        await asyncio.sleep(_RETRY_S)


@contextmanager
def _keys(pressed: Callable[[str], None]) -> Iterator[None]:
    """Report pressed keys if standard input is a terminal that supports it."""
    try:
        import termios
        import tty
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, lambda: pressed(os.read(descriptor, 1).decode(errors="replace")))
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
