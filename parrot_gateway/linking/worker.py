"""The linking process: reads what calls say and answers questions about them.

Run by `service.LinkingService` as `python -m parrot_gateway.linking.worker`. It is a process of its
own, less urgent than the gateway's, so that its work delays no call.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import BinaryIO

import msgspec

from parrot_gateway.linking.journal import LinkJournal
from parrot_gateway.linking.linker import LinkerLimits
from parrot_gateway.linking.wire import (
    PREFIX_BYTES,
    AnswerSeen,
    ForecastsWanted,
    Query,
    Reply,
    RequestSeen,
    decode_to_worker,
    encode,
    length_of,
)

#: How much less urgent than the gateway.
_NICENESS = 15


def run(source: BinaryIO, sink: BinaryIO, journal: LinkJournal) -> None:
    """Serve until `source` ends."""
    while len(prefix := source.read(PREFIX_BYTES)) == PREFIX_BYTES:
        message = decode_to_worker(source.read(length_of(prefix)))
        if isinstance(message, RequestSeen):
            journal.request(message)
        elif isinstance(message, AnswerSeen):
            journal.answer(message)
        elif isinstance(message, ForecastsWanted):
            pass
        else:
            sink.write(
                encode(Reply(message.number, msgspec.json.encode(_answer(journal, message))))
            )
            sink.flush()


def _answer(journal: LinkJournal, query: Query) -> object:
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
    return journal.statistics()


def main() -> None:
    """Serve the gateway that is at the other end of standard input and output.

    Arguments are the fields of `LinkerLimits` and the number of tenants, as JSON.
    """
    with suppress(OSError):
        os.nice(_NICENESS)
    limits, max_tenants = msgspec.json.decode(sys.argv[1], type=tuple[LinkerLimits, int])
    run(sys.stdin.buffer, sys.stdout.buffer, LinkJournal(limits, max_tenants))


if __name__ == "__main__":
    main()
