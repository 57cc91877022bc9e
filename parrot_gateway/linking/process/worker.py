"""The linking process: reads requests and answers, and answers questions about them.

Run by `service.LinkingService` as `python -m parrot_gateway.linking.process.worker`. It is a
separate process with lower priority than the gateway's, so that its work delays no call.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from parrot_gateway.linking.process.inbox import Inbox
from parrot_gateway.linking.process.journal import LinkJournal
from parrot_gateway.linking.process.wire import (
    AnswerSeen,
    ForecastsWanted,
    Query,
    Reply,
    RequestSeen,
    Watch,
    encode,
)
from parrot_gateway.linking.profiles.profile_store import ProfileStore
from parrot_gateway.linking.tenants import LinkerLimits

#: Priority below the gateway's.
_NICENESS = 15
_GC_THRESHOLDS = (20_000, 20, 20)
#: Newest calls of a session that a watcher is told.
MAX_TOLD = 1000
#: Time for which changes for a watcher are gathered while further messages wait.
_GATHER_S = 0.05


def run(inbox: Inbox, sink: BinaryIO, journal: LinkJournal) -> None:
    """Serve until the other end closes."""
    while journal.profiles.has_changed:
        _tell_forecasts(sink, journal)
    told_at = 0.0
    while (message := inbox.next()) is not None:
        if isinstance(message, RequestSeen):
            journal.request(message)
        elif isinstance(message, AnswerSeen):
            journal.answer(message)
        elif isinstance(message, ForecastsWanted):
            _tell_forecasts(sink, journal)
            journal.profiles.save(message.now)
        elif isinstance(message, Watch):
            for changes in journal.watch(message.on):
                sink.write(encode([changes]))
            sink.flush()
        else:
            if message.what == "watched_calls":
                for changes in journal.told_calls(message.tenant, message.name, MAX_TOLD):
                    sink.write(encode([changes]))
            answer = _answer(journal, inbox, message)
            sink.write(encode([Reply(message.number, msgspec.json.encode(answer))]))
            sink.flush()
        if journal.has_changed and (inbox.is_empty or time.monotonic() - told_at > _GATHER_S):
            told_at = time.monotonic()
            sink.write(encode([journal.changes()]))
            sink.flush()
    journal.profiles.save(time.time(), is_last=True)


def _tell_forecasts(sink: BinaryIO, journal: LinkJournal) -> None:
    for change in journal.profiles.changes():
        sink.write(encode([change]))
    sink.flush()


def _answer(journal: LinkJournal, inbox: Inbox, query: Query) -> object:
    if query.what == "call":
        return journal.describe_call(query.tenant, query.name)
    if query.what == "session_of":
        return journal.session_of(query.tenant, query.name)
    if query.what == "session":
        return journal.describe_session(query.tenant, query.name)
    if query.what == "sessions":
        return journal.describe_sessions(query.tenant)
    if query.what == "graph":
        return journal.describe_graph(query.tenant, query.name)
    if query.what == "watched_calls":
        return True
    if query.what == "profiles":
        return journal.describe_profiles(query.tenant)
    return journal.statistics() | inbox.describe()


def main() -> None:
    """Serve the gateway at the other end of standard input and output.

    The argument is JSON: the fields of `LinkerLimits`, the maximum tenants, the maximum templates
    of each, and the file of profiles or null.
    """
    with suppress(OSError):
        os.nice(_NICENESS)
    # Kept objects live long, so frequent collections would find nothing.
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    limits, max_tenants, max_templates, file = msgspec.json.decode(
        sys.argv[1], type=tuple[LinkerLimits, int, int, str | None]
    )
    profiles = ProfileStore(max_tenants, max_templates, Path(file) if file else None)
    run(Inbox(sys.stdin.fileno()), sys.stdout.buffer, LinkJournal(limits, max_tenants, profiles))


if __name__ == "__main__":
    main()
