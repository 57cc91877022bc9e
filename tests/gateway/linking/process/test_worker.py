"""Messages of the gateway and what the linking process says to each."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parrot_gateway.linking.process import inbox
from parrot_gateway.linking.process.inbox import Inbox
from parrot_gateway.linking.process.journal import LinkJournal
from parrot_gateway.linking.process.wire import (
    PREFIX_BYTES,
    AnswerSeen,
    FromWorker,
    LinksChanged,
    Query,
    Reply,
    RequestSeen,
    ToWorker,
    Watch,
    decode_from_worker,
    encode,
    length_of,
)
from parrot_gateway.linking.process.worker import run
from parrot_gateway.linking.process.worker_process import end, limits_of, spawn
from parrot_gateway.linking.profiles.forecast import ForecastsChanged
from parrot_gateway.linking.profiles.profile_store import ProfileStore
from parrot_gateway.linking.profiles.profiles import Profile
from parrot_gateway.linking.profiles.templates import template_of
from parrot_gateway.settings.model import LinkingSettings

PATH = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was sent is handled, however slowly."""
    monkeypatch.setattr(inbox, "_LAST_S", 60.0)


def request(number: int, text: str) -> RequestSeen:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    data = json.dumps(body).encode()
    # Times ahead of the clock are never too long ago.
    return RequestSeen("t", f"c{number}", f"req_{number}", PATH, "", 1e10 + 2 * number, data)


def answer(number: int) -> AnswerSeen:
    data = b'{"id": "r", "choices": [{"message": {"content": "Yes."}}]}'
    return AnswerSeen("t", f"c{number}", 200, 1e10 + 2 * number + 1, data)


def said(messages: list[ToWorker], profiles: ProfileStore | None = None) -> list[FromWorker]:
    """Return the answers to these messages; then the pipe is closed."""
    reading, writing = os.pipe()
    settings, sink = LinkingSettings(), io.BytesIO()
    if profiles is None:
        profiles = ProfileStore(settings.max_tenants, settings.max_templates)
    journal = LinkJournal(limits_of(settings), settings.max_tenants, profiles)
    os.write(writing, b"".join(encode([each]) for each in messages))
    os.close(writing)
    run(Inbox(reading), sink, journal)
    os.close(reading)
    data, found = sink.getvalue(), list[FromWorker]()
    while data:
        size = PREFIX_BYTES + length_of(data[:PREFIX_BYTES])
        found += decode_from_worker(data[PREFIX_BYTES:size])
        data = data[size:]
    return found


def reply(said: FromWorker) -> Any:
    assert isinstance(said, Reply)
    return msgspec.json.decode(said.body)


def test_each_question_has_its_answer() -> None:
    messages: list[ToWorker] = [request(1, "Who is there?"), answer(1)]
    kinds = ("call", "session_of", "session", "sessions", "graph", "profiles", "statistics")
    session = "sess_c1"
    names = {"session": session, "graph": session}
    messages += [
        Query(number, "t", what, names.get(what, "c1")) for number, what in enumerate(kinds)
    ]
    messages.append(Query(7, "t", "call", "none"))
    replies = said(messages)
    assert [each.number for each in replies if isinstance(each, Reply)] == list(range(8))
    call, of, one, listed, graph, profiles, statistics, none = map(reply, replies)
    assert (call["id"], call["state"], of, one["id"]) == ("c1", "done", session, session)
    assert [each["id"] for each in listed["data"]] == [session]
    assert [each["id"] for each in graph["calls"]] == ["c1"]
    assert profiles == {"object": "list", "data": []}
    assert (statistics["linked"], statistics["waiting"], statistics["skipped"]) == (1, 1, 0)
    assert none is None


def test_one_who_watches_is_told_of_changes_before_the_answer() -> None:
    # In turns with the tenant's calls, as one who watches is of no tenant.
    told = said(
        [request(1, "Who?"), Watch(True), Query(1, "t", "watched_calls", "sess_c1"), Watch(False),
         answer(1)]
    )  # fmt: skip
    first, calls, done = told
    assert isinstance(first, LinksChanged)
    assert isinstance(calls, LinksChanged)
    assert [each.id for each in first.sessions] == ["sess_c1"]
    assert ([call["id"] for call in calls.calls], reply(done)) == (["c1"], True)
    first, changed = said([Watch(True), request(1, "Who?")])
    assert isinstance(changed, LinksChanged)
    assert [call["id"] for call in changed.calls] == ["c1"]


def test_profiles_are_told_at_the_start_and_kept_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "profiles"
    store = ProfileStore(10, 100, file)
    store.tenant("t").restore(Profile(template_of(b'"messages":[{"role":"user","content":"Hi')))
    for _ in range(2):
        (known,) = said([], store)
        store = ProfileStore(10, 100, file)
        assert isinstance(known, ForecastsChanged)
        assert (known.tenant, len(known.changed), known.removed) == ("t", 1, [])


@pytest.mark.parametrize("has_file", [False, True])
async def test_a_process_answers_with_and_without_a_file(has_file: bool, tmp_path: Path) -> None:
    file = tmp_path / "profiles" if has_file else None
    process = await spawn(LinkingSettings(profiles_file=file))
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(encode([request(1, "Who?"), Query(9, "t", "session_of", "c1")]))
        async with asyncio.timeout(60):
            prefix = await process.stdout.readexactly(PREFIX_BYTES)
            frame = await process.stdout.readexactly(length_of(prefix))
        assert decode_from_worker(frame) == [Reply(9, b'"sess_c1"')]
    finally:
        await end(process)
    assert (tmp_path / "profiles").exists() == has_file
