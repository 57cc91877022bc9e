"""Which deterministic calls of a session are in work or done, so that none is run twice.

Two calls are identical when kind, body with values and transform are; which fields of a body cannot
change the text is known here. Holds ids, never texts.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec

from parrot_gateway.generation.requests.call import CallRequest
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.variable import Variable

#: Calls remembered for each session, oldest forgotten first.
MAX_REMEMBERED = 4096

#: How an answer travels, and who asked, do not change its text.
_IRRELEVANT = frozenset(
    {"stream", "stream_options", "user", "metadata", "safety_identifier", "store", "parrot"}
)
_TEMPERATURE = msgspec.json.Decoder(float | None)
_NULL = msgspec.Raw(b"null")
_SEED = msgspec.json.Decoder(int | None)


def is_deterministic(request: CallRequest) -> bool:
    """Whether the same request asks for the same text: temperature 0, or a seed."""
    fields = request.fields
    try:
        temperature = _TEMPERATURE.decode(fields.get("temperature", _NULL))
        seed = _SEED.decode(fields.get("seed", _NULL))
    except msgspec.DecodeError:
        return False
    return temperature == 0 or seed is not None


def fingerprint(request: CallRequest, transform: str) -> bytes:
    """Equal for identical calls only."""
    fields = request.fields
    digest = hashlib.blake2b(digest_size=16)
    texts = [request.kind.encode(), transform.encode()]
    for name in sorted(fields.keys() - _IRRELEVANT):
        texts += (name.encode(), bytes(fields[name]))
    for text in texts:
        digest.update(b"%d:" % len(text))
        digest.update(text)
    return digest.digest()


class DeduplicationCache:
    """The deterministic calls of all sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, OrderedDict[bytes, str]] = {}

    def find(self, job: Job, request: CallRequest) -> Variable | None:
        """The output of an identical call that was begun before; else `job`'s is remembered.

        Args:
            job: has an output.
            request: with values bound.
        """
        # NOTE: asked of the request before values were bound, which have no part in this.
        if job.output is None or job.spec.request is None or not is_deterministic(job.spec.request):
            return None
        transform = job.spec.transform
        key = fingerprint(request, "" if transform is None else transform.text)
        known = self._sessions.setdefault(job.session.id, OrderedDict())
        variable = job.session.get(known[key]) if key in known else None
        if variable is not None and variable.state in ("running", "ready"):
            return variable
        known[key] = job.output.id
        known.move_to_end(key)
        if len(known) > MAX_REMEMBERED:
            known.popitem(last=False)
        return None

    def forget(self, session_id: str) -> None:
        """The session is gone."""
        self._sessions.pop(session_id, None)

    def __len__(self) -> int:
        return sum(map(len, self._sessions.values()))
