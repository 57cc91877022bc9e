"""Messages between the gateway and its linking process.

Those that leave together are one frame: a list in msgpack behind its length of four bytes. Both
processes know a session by the id of its first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from parrot_gateway.linking.profiles.forecast import ForecastsChanged

#: Bytes of a frame's length.
PREFIX_BYTES = 4


# NOTE: `gc=False` keeps messages, of which there are many, out of the garbage collector; they hold
# no containers, and so make no cycles.
class RequestSeen(msgspec.Struct, tag="request", array_like=True, gc=False):
    """A call has begun.

    Attributes:
        session: id of the session that its client has named; empty if none.
        now: seconds since the epoch.
        peer: host and port at the client's end of the connection; empty where they are not known.
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
        call: id of the call, or of a response that was not finished when its call ended.
        status: of the answer; 0 when the client left.
        body: as far as it was sent; the beginning of one that is too long.
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
            `statistics`, or `watched_calls`: those of a session, told as `LinksChanged` before the
            answer, which is true.
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
    """Asks for changes from now on, as `LinksChanged`, or no more; the first tell all sessions."""

    on: bool


class Reply(msgspec.Struct, tag="reply", array_like=True):
    """The answer to a `Query`.

    Attributes:
        body: JSON; `null` for what is not known.
    """

    number: int
    body: bytes


class SessionSummary(msgspec.Struct, array_like=True):
    """A session, declared or inferred, by the calls of it that are known.

    Attributes:
        failed: calls that failed or whose client left.
        depth, width: of the graph that its links make: the longest path in calls, and the most
            calls at equal depth.
        joined: ids of the calls that it did not have when it was told of last.
        merged: ids of sessions that have become part of it since.
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
        calls: as `LinkJournal.describe_call` gives them; none in the ones that begin a watch.
        is_first: the watch begins; nothing told before counts.
        is_whole: all that there was when the watch began has been told.
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
    """The id of the session that a call begins."""
    return "sess_" + call.rpartition("_")[2]


def encode(messages: Sequence[ToWorker] | Sequence[FromWorker]) -> bytes:
    """A frame of these messages."""
    data = _encoder.encode(messages)
    return len(data).to_bytes(PREFIX_BYTES, "big") + data


def length_of(prefix: bytes | memoryview) -> int:
    """Bytes that follow a prefix of `PREFIX_BYTES`."""
    return int.from_bytes(prefix, "big")


def decode_to_worker(data: bytes | memoryview) -> list[ToWorker]:
    """The messages of a frame for the worker, without its length."""
    return _to_worker.decode(data)


def decode_from_worker(data: bytes) -> list[FromWorker]:
    """The messages of a frame from the worker, without its length."""
    return _from_worker.decode(data)
