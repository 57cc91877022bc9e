"""A linker's edges and sessions against the truth.

An edge is a pair of calls; naming it twice, with two kinds, counts once. Neutral ones are left out.
Of one pair, a kind is right if it is asked for; `output` always is (the answer stands there).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import quantiles
from typing import Any, Protocol

import msgspec

from parrot_bench.linking.schedule import Event
from parrot_bench.linking.script import KINDS, Call, Script, answer_id
from parrot_gateway.linking.linker.conversation import answer_of, conversation_of
from parrot_gateway.linking.linker.links import Link


class Linker(Protocol):
    """A linker to judge. The caller names calls; `now` is in seconds and never goes back."""

    def request(
        self, tenant: str, call: str, body: bytes, path: str, now: float
    ) -> Sequence[Link]: ...

    def answer(self, tenant: str, call: str, body: bytes, now: float) -> None: ...

    def session_of(self, tenant: str, call: str) -> str: ...


class GatewayLinker:
    """The gateway's own linker, with its default limits."""

    def __init__(self) -> None:
        # Here, so that the command line does not wait for them.
        from parrot_gateway.linking.linker.linker import Linker as CallLinker
        from parrot_gateway.linking.process.worker_process import limits_of
        from parrot_gateway.settings.model import LinkingSettings

        numbers = count()
        settings = LinkingSettings()
        self._linker = CallLinker(
            lambda: f"session-{next(numbers)}", limits_of(settings), settings.max_tenants
        )
        self._paths: dict[str, str] = {}

    def request(self, tenant: str, call: str, body: bytes, path: str, now: float) -> Sequence[Link]:
        conversation = conversation_of(path, body)
        self._paths[call] = path
        if conversation is None:
            return ()
        return self._linker.tenant(tenant).request(call, conversation, now, None, "").links

    def answer(self, tenant: str, call: str, body: bytes, now: float) -> None:
        answer = answer_of(self._paths.pop(call), body)
        if answer is not None:
            self._linker.tenant(tenant).answer(call, answer, now)

    def session_of(self, tenant: str, call: str) -> str:
        session = self._linker.tenant(tenant).session_of(call)
        return call if session is None else session.id


@dataclass(slots=True)
class Score:
    """Counts of one run.

    `right`, `missed` and `neutral` are edges; so is `wrong`, of which `ancestors` come from the
    call's true ancestors, `equal` from a call that was asked and has answered the very same as the
    true source, and `across` from another tenant.
    """

    calls: int = 0
    right: int = 0
    missed: int = 0
    wrong: int = 0
    ancestors: int = 0
    equal: int = 0
    neutral: int = 0
    #: Edges from short answers: found and there.
    short_found: int = 0
    short: int = 0
    across: int = 0
    #: By kind: said and right, said, asked for and said, asked for.
    kinds: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    f1: float = 1.0
    #: Seconds of CPU time that each call took, request and answer.
    seconds: list[float] = field(default_factory=list)
    #: "wrong" or "missed", the call, the other call, the kinds.
    faults: list[tuple[str, Call, Call, str]] = field(default_factory=list)

    @property
    def precision(self) -> float:
        return _share(self.right, self.right + self.wrong)

    @property
    def recall(self) -> float:
        return _share(self.right, self.right + self.missed)

    @property
    def ancestor_precision(self) -> float:
        return _share(self.right + self.ancestors, self.right + self.wrong)

    @property
    def equal_precision(self) -> float:
        return _share(self.right + self.equal, self.right + self.wrong)

    def microseconds(self, percent: int) -> float:
        """The percentile of the time of a call."""
        if len(self.seconds) < 2:
            return 1e6 * sum(self.seconds)
        return 1e6 * quantiles(self.seconds, n=100, method="inclusive")[percent - 1]

    def to_dict(self) -> dict[str, Any]:
        names = ("calls", "right", "missed", "wrong", "ancestors", "equal", "neutral",
                 "short_found", "short", "across")  # fmt: skip
        kinds = {
            kind: {"precision": _share(right, said), "recall": _share(met, asked), "asked": asked}
            for kind, (right, said, met, asked) in self.kinds.items()
        }
        return {name: getattr(self, name) for name in names} | {
            "precision": self.precision,
            "recall": self.recall,
            "ancestor_precision": self.ancestor_precision,
            "equal_precision": self.equal_precision,
            "session_f1": self.f1,
            "kinds": kinds,
            "p50_us": self.microseconds(50),
            "p99_us": self.microseconds(99),
        }


def run(events: Iterable[Event], scripts: Sequence[Script], linker: Linker) -> Score:
    """Send a linker the events; score its links, and the sessions at the end."""
    said: dict[str, dict[str, set[str]]] = {}
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        call = event.call
        if event.what == "request":
            body = msgspec.json.encode(call.request)
            began = time.thread_time()
            links = linker.request(call.tenant, call.id, body, call.path, event.at_s)
            seconds[call.id] += time.thread_time() - began
            found = said.setdefault(call.id, defaultdict(set))
            for link in links:
                found[link.source].add(link.kind)
        else:
            body = msgspec.json.encode({"id": answer_id(call.id), **(call.answer or {})})
            began = time.thread_time()
            linker.answer(call.tenant, call.id, body, event.at_s)
            seconds[call.id] += time.thread_time() - began
    calls = [call for script in scripts for call in script.calls.values()]
    score = compare(calls, said)
    score.seconds = list(seconds.values())
    score.f1 = pairwise_f1(
        [
            (call.session, f"{call.tenant} {linker.session_of(call.tenant, call.id)}")
            for call in calls
        ]
    )
    return score


def compare(calls: Sequence[Call], said: dict[str, dict[str, set[str]]]) -> Score:
    """The edges said, kinds by source by call, against the truth."""
    by_id = {call.id: call for call in calls}
    ancestors: dict[str, frozenset[str]] = {}
    for call in calls:
        direct = call.short.union(call.edges)
        ancestors[call.id] = direct.union(*(ancestors[source] for source in direct))
    score = Score(calls=len(calls))
    right, claimed, met, asked = (Counter[str]() for _ in range(4))
    for call in calls:
        found = said.get(call.id, {})
        score.short += len(call.short)
        score.short_found += len(call.short & set(found))
        for kinds in call.edges.values():
            asked.update(kinds)
        for source, names in found.items():
            claimed.update(() if source in call.neutral else names)
            if source in call.edges:
                score.right += 1
                right.update(names & {*call.edges[source], "output"})
                met.update(names & {*call.edges[source]})
                continue
            if source in call.neutral:
                score.neutral += 1
                continue
            score.wrong += 1
            score.ancestors += source in ancestors[call.id]
            score.across += by_id[source].tenant != call.tenant
            score.equal += any(_is_equal(by_id[source], by_id[true]) for true in call.edges)
            score.faults.append(("wrong", call, by_id[source], "+".join(sorted(names))))
        for source, kinds in call.edges.items():
            if source not in found:
                score.missed += 1
                score.faults.append(("missed", call, by_id[source], "+".join(kinds)))
    score.kinds = {kind: (right[kind], claimed[kind], met[kind], asked[kind]) for kind in KINDS}
    return score


def pairwise_f1(labels: Sequence[tuple[str, str]]) -> float:
    """F1 of pairs of calls in one session, from true and said session of every call."""
    both = _pairs(Counter(labels))
    true = _pairs(Counter(label for label, _ in labels))
    said = _pairs(Counter(label for _, label in labels))
    return _share(2 * both, true + said)


def _is_equal(one: Call, other: Call) -> bool:
    return one.request == other.request and one.answer == other.answer


def _pairs(counts: Counter[Any]) -> int:
    return sum(count * (count - 1) // 2 for count in counts.values())


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
