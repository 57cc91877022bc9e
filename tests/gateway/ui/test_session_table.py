"""The list of sessions stays bounded, and follows what the linking process says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from parrot_gateway.linking.process.wire import LinksChanged, SessionSummary
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.model import Settings
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.ui import session_table
from parrot_gateway.ui.history import CallHistory
from parrot_gateway.ui.session_table import SessionTable


class Watched:
    """A table, fed by hand with what the linking process would say."""

    def __init__(self) -> None:
        self.gateway = Gateway(Settings())
        self.records = self.gateway.call_records
        self.calls = CallHistory(self.records, lambda record: False)
        self.table = SessionTable(self.gateway.semantic.sessions, self.gateway.linking, self.calls)

    async def open(self) -> None:
        await self.table.open(lambda changes: None)

    def begin(self, call: str, started: float = 0.0) -> CallRecord:
        record = CallRecord("req_" + call, call, started)
        self.records.begin(record, "/v1/chat/completions")
        return record

    def end(self, call: str, tokens: int) -> None:
        record = self.begin(call)
        record.prompt_tokens, record.output_tokens = tokens, 1
        record.end()

    def say(self, *sessions: SessionSummary, is_first: bool = False) -> None:
        self.gateway.linking._receive(LinksChanged([*sessions], [], is_first, True))

    def views(self) -> dict[str, dict[str, Any]]:
        live = self.calls.live()
        self.table.changes(live)
        while self.table._dirty:
            self.table.changes(live)
        decoded = (msgspec.json.decode(view) for view in self.table.views())
        return {view["id"]: view for view in decoded}


def summary(
    session: str, *joined: str, merged: tuple[str, ...] = (), used: float = 1.0, calls: int = 1
) -> SessionSummary:
    return SessionSummary(
        "t", session, True, ["m"], 1.0, used, calls, 0, 0, 1, 1, [*joined], [*merged]
    )


async def test_tokens_are_counted_once_wherever_calls_belong_in_the_end() -> None:
    watched = Watched()
    watched.end("c1", 10)
    await watched.open()
    # Known before it was told, told before it has ended, and moved with its session.
    watched.say(summary("s1", "c1"), is_first=True)
    watched.say(summary("s2", "c2"))
    watched.end("c2", 100)
    assert watched.views()["s1"]["prompt_tokens"] == 10
    assert watched.views()["s2"]["prompt_tokens"] == 100
    watched.say(summary("s1", "c3", merged=("s2",), calls=3))
    watched.end("c3", 1000)
    views = watched.views()
    assert list(views) == ["s1"]
    assert (views["s1"]["prompt_tokens"], views["s1"]["output_tokens"]) == (1110, 3)
    # A linking process that was started again tells everything once more.
    watched.say(summary("s1", "c1", "c2", "c3", calls=3), is_first=True)
    assert watched.views()["s1"]["prompt_tokens"] == 1110
    # One that knows nothing takes its sessions along.
    watched.say(is_first=True)
    assert watched.views() == {}


async def test_a_call_that_nobody_has_placed_stands_for_its_session() -> None:
    watched = Watched()
    await watched.open()
    record = watched.begin("call_0123456789abcdef01234567")
    view = watched.views()["sess_0123456789abcdef01234567"]
    assert (view["state"], view["calls"], view["inferred"]) == ("running", 1, True)
    watched.say(summary("sess_other", record.call_id, calls=5))
    views = watched.views()
    assert list(views) == ["sess_other"]
    assert (views["sess_other"]["calls"], views["sess_other"]["running"]) == (5, 1)
    record.end()
    assert watched.views()["sess_other"]["state"] == "idle"


async def test_only_the_newest_sessions_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_table, "MAX_SESSIONS", 5)
    monkeypatch.setattr(session_table, "_SLACK", 2)
    monkeypatch.setattr(session_table, "_MAX_CALLS", 50)
    watched = Watched()
    await watched.open()
    for number in range(100):
        watched.say(summary(f"s{number}", f"c{number}", used=float(number)))
        assert 1 <= len(watched.views()) <= 7
    assert "s99" in watched.views()
    # What is remembered of calls is bounded too: past that, everything is read anew.
    watched.say(is_first=True)
    assert watched.table._session_of == {}
    watched.table.close()
    assert watched.table.views() == []
