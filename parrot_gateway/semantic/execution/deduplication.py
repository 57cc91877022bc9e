"""Finds identical deterministic calls of a session, so that each runs once. Keeps ids, never texts.

Two calls are identical if their kind, transform and body with values are.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec

from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.variable import Variable

#: Calls remembered per session; the oldest are forgotten first.
MAX_REMEMBERED = 4096

#: Fields that do not change the text.
_IRRELEVANT = frozenset(
    {"stream", "stream_options", "user", "metadata", "safety_identifier", "store", "parrot"}
)
_TEMPERATURE = msgspec.json.Decoder(float | None)
_NULL = msgspec.Raw(b"null")
_SEED = msgspec.json.Decoder(int | None)


def is_deterministic(request: CallRequest) -> bool:
    """Return true if equal requests get equal texts: temperature 0, or a seed."""
    fields = request.fields
    try:
        temperature = _TEMPERATURE.decode(fields.get("temperature", _NULL))
        seed = _SEED.decode(fields.get("seed", _NULL))
    except msgspec.DecodeError:
        return False
    return temperature == 0 or seed is not None


def fingerprint(request: CallRequest, transform: str) -> bytes:
    """Hash a call so that only identical calls are equal."""
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
    def __init__(self) -> None:
        self._sessions: dict[str, OrderedDict[bytes, str]] = {}

    def find(self, job: Job, request: CallRequest) -> Variable | None:
        """Return the output of an earlier identical call, or remember `job`'s.

        Args:
            request: with values bound.
        """
        # NOTE: checked before values are bound, as they do not matter here.
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
        self._sessions.pop(session_id, None)

    def __len__(self) -> int:
        return sum(map(len, self._sessions.values()))
