"""Messages between the gateway and its linking process.

Messages that leave together form one frame: a msgpack list behind its length of four bytes. Both
processes know a session by the id of its first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from parrot_gateway.linking.profiles.forecast import ForecastsChanged

#: Bytes of a frame's length.
PREFIX_BYTES = 4


# NOTE: `gc=False` keeps the many messages out of the garbage collector; they contain no containers,
# so they form no cycles.
class RequestSeen(msgspec.Struct, tag="request", array_like=True, gc=False):
    """A call has begun.

    Attributes:
        session: id of the session that its client named; empty if none.
        now: seconds since the epoch.
        peer: host and port of the client's end of the connection; empty if unknown.
    """

    tenant: str
    call: str
    request_id: str
    path: str
    session: str
    now: float
    body: bytes
    peer: str = ""


class AnswerSeen(msgspec.Struct, tag="answer", array_like=True, gc=False):
    """A call has ended.

    Attributes:
        call: id of the call, or of a response unfinished at its call's end.
        status: HTTP status of the answer; 0 if the client left.
        body: the answer as far as it was sent; only the beginning if it is too long.
    """

    tenant: str
    call: str
    status: int
    now: float
    body: bytes


class Query(msgspec.Struct, tag="query", array_like=True, gc=False):
    """A question; the answer is a `Reply` of the same number.

    Attributes:
        what: `call`, `session_of` (a call), `session`, `sessions`, `graph`, `profiles`,
            `statistics`, or `watched_calls`: a session's calls, sent as `LinksChanged` before
            the answer `true`.
        name: id of a call, a request, a response or a session.
    """

    number: int
    tenant: str
    what: str
    name: str


class ForecastsWanted(msgspec.Struct, tag="forecasts_wanted", array_like=True):
    """Asks for the changes since the last one, as `ForecastsChanged`.

    Attributes:
        now: seconds since the epoch.
    """

    now: float


class Watch(msgspec.Struct, tag="watch", array_like=True):
    """Start or stop sending changes as `LinksChanged`; the first ones list all sessions."""

    on: bool


class Reply(msgspec.Struct, tag="reply", array_like=True):
    """The answer to a `Query`.

    Attributes:
        body: JSON; `null` if unknown.
    """

    number: int
    body: bytes


class SessionSummary(msgspec.Struct, array_like=True):
    """A declared or inferred session, summarised from its known calls.

    Attributes:
        failed: number of calls that failed.
        depth, width: of the graph of its links: the longest path in calls, and the most
            calls at one depth.
        joined: ids of calls added since its last report.
        merged: ids of sessions merged into it since.
        title: for people; see `session_titles`.
    """

    tenant: str
    id: str
    inferred: bool
    models: list[str]
    created: float
    last_used: float
    calls: int
    unfinished: int
    failed: int
    depth: int
    width: int
    joined: list[str]
    merged: list[str]
    title: str = ""


class LinksChanged(msgspec.Struct, tag="links_changed", array_like=True):
    """The changes since the last one.

    Attributes:
        calls: as `LinkJournal.describe_call` gives them; none in the first ones of a watch.
        is_first: true at the start of a watch; earlier reports are void.
        is_whole: true once everything from before the watch has been reported.
    """

    sessions: list[SessionSummary]
    calls: list[dict[str, Any]]
    is_first: bool
    is_whole: bool


ToWorker: TypeAlias = RequestSeen | AnswerSeen | Query | ForecastsWanted | Watch
FromWorker: TypeAlias = Reply | ForecastsChanged | LinksChanged

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[list[ToWorker]] = msgspec.msgpack.Decoder(list[ToWorker])
_from_worker: msgspec.msgpack.Decoder[list[FromWorker]] = msgspec.msgpack.Decoder(list[FromWorker])


def session_id_of(call: str) -> str:
    """Return the id of the session that a call begins."""
    return "sess_" + call.rpartition("_")[2]


def encode(messages: Sequence[ToWorker] | Sequence[FromWorker]) -> bytes:
    """Encode messages as a frame."""
    data = _encoder.encode(messages)
    return len(data).to_bytes(PREFIX_BYTES, "big") + data


def length_of(prefix: bytes | memoryview) -> int:
    """Return the number of bytes that follow a prefix of `PREFIX_BYTES`."""
    return int.from_bytes(prefix, "big")


def decode_to_worker(data: bytes | memoryview) -> list[ToWorker]:
    """Decode a frame's messages to the worker, without its length."""
    return _to_worker.decode(data)


def decode_from_worker(data: bytes) -> list[FromWorker]:
    """Decode a frame's messages from the worker, without its length."""
    return _from_worker.decode(data)
