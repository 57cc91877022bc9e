"""Forecasts of calls when they arrive, against what then happens.

The calls go through all that the linking process does; what it has learned reaches the forecasts
once a second, as in the gateway.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import msgspec

from parrot_bench.linking.schedule import Event
from parrot_bench.linking.script import Call, Script, answer_id
from parrot_gateway.linking.linker.conversation import answer_of
from parrot_gateway.linking.process.journal import LinkJournal
from parrot_gateway.linking.process.wire import AnswerSeen, RequestSeen
from parrot_gateway.linking.process.worker_process import limits_of
from parrot_gateway.linking.profiles.forecast import ENOUGH, Forecast, Forecasts
from parrot_gateway.linking.profiles.profile_store import ProfileStore
from parrot_gateway.linking.profiles.profiles import output_tokens
from parrot_gateway.settings.model import LinkingSettings

#: How often what was learned reaches the forecasts.
_PUSH_S = 1.0


@dataclass(slots=True)
class _Seen:
    """One call: its forecast when it arrived, and what happened."""

    call: Call
    forecast: Forecast | None
    started: float
    ended: float | None = None
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class RoleCalibration:
    """The calls of one role. Shares are of those that had a forecast from enough calls.

    Attributes:
        foretold: share of all calls that had one.
        exact: share whose template is its role's: the role's most common one, and of most calls
            with it the role.
        length_p50, length_p90: share of answers no longer than foretold.
        successor: share where the likeliest successor is one; where none is likelier, none.
        fan_in, fan_in_true: mean foretold share of answers that are read together, and theirs.
        size_error: of those the mean difference between answers foretold and read.
        returns, returns_true: the same of calls that are continued.
        gap_p50, gap_p90: share of answers used within the time foretold, of those that are used.
    """

    role: str
    calls: int
    foretold: float
    exact: float | None
    length_p50: float | None
    length_p90: float | None
    successor: float | None
    fan_in: float | None
    fan_in_true: float | None
    size_error: float | None
    returns: float | None
    returns_true: float | None
    gap_p50: float | None
    gap_p90: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def calibrate(events: Iterable[Event], scripts: Sequence[Script]) -> list[RoleCalibration]:
    """Send all calls; compare forecasts with the truth, by role in order of appearance, then for
    all calls."""
    seen = _send(events)
    calls = [call for script in scripts for call in script.calls.values() if call.id in seen]
    readers: dict[str, list[_Seen]] = defaultdict(list)
    groups: dict[str, int] = {}
    for each in seen.values():
        for source in each.call.edges:
            readers[source].append(each)
        for group in _groups(each, seen):
            for source in group:
                groups.setdefault(source, len(group))
    role_of, template_of = _majorities(seen.values())
    by_role: dict[str, list[_Seen]] = defaultdict(list)
    for call in calls:
        if call.role:
            by_role[call.role].append(seen[call.id])
    by_role["all"] = list(seen.values())

    def calibrated(role: str, members: Sequence[_Seen]) -> RoleCalibration:
        known = [
            (each, each.forecast)
            for each in members
            if each.forecast is not None and each.forecast.weight >= ENOUGH
        ]
        ended = [(each, forecast) for each, forecast in known if each.ended is not None]
        sizes = [(groups[each.call.id], f.fan_in) for each, f in known if each.call.id in groups]
        gaps = [
            (min(reader.started for reader in readers[each.call.id]) - (each.ended or 0.0), f.gap_s)
            for each, f in ended
            if readers[each.call.id] and f.gap_s[1]
        ]
        exact: list[bool] = []
        successors: list[bool] = []
        for each, f in known if any(scripted.role for scripted in calls) else ():
            own = each.call.role
            exact.append(role_of[f.template] == own and template_of[own] == f.template)
            true = {reader.call.role for reader in readers[each.call.id]}
            none = 1.0 - sum(probability for _, probability, _ in f.successors)
            if f.successors and f.successors[0][1] >= none:
                successors.append(role_of.get(f.successors[0][0]) in true)
            else:
                successors.append(not true)
        return RoleCalibration(
            role=role,
            calls=len(members),
            foretold=len(known) / len(members),
            exact=_mean(exact),
            length_p50=_mean(each.tokens <= f.output_tokens[0] for each, f in ended),
            length_p90=_mean(each.tokens <= f.output_tokens[1] for each, f in ended),
            successor=_mean(successors),
            fan_in=_mean(f.feeds_fan_in for _, f in known),
            fan_in_true=_mean(each.call.id in groups for each, _ in known),
            size_error=_mean(abs(true - said) for true, said in sizes if said),
            returns=_mean(f.returns for _, f in known),
            returns_true=_mean(_returns(each, readers[each.call.id]) for each, _ in known),
            gap_p50=_mean(gap <= said[0] for gap, said in gaps),
            gap_p90=_mean(gap <= said[1] for gap, said in gaps),
        )

    return [calibrated(role, members) for role, members in by_role.items()]


def _send(events: Iterable[Event]) -> dict[str, _Seen]:
    """All calls by id, with their forecasts when they arrived."""
    settings = LinkingSettings()
    store = ProfileStore(settings.max_tenants, settings.max_templates)
    journal = LinkJournal(limits_of(settings), settings.max_tenants, store)
    forecasts = Forecasts()
    seen: dict[str, _Seen] = {}
    pushed = 0.0
    for at, what, call in events:
        if at - pushed >= _PUSH_S:
            pushed = at
            for change in store.changes():
                forecasts.update(change.tenant, change.changed, change.removed)
        if what == "request":
            body = msgspec.json.encode(call.request)
            seen[call.id] = _Seen(call, forecasts.of(call.tenant, body), at)
            journal.request(RequestSeen(call.tenant, call.id, call.id, call.path, "", at, body))
        else:
            body = msgspec.json.encode({"id": answer_id(call.id), **(call.answer or {})})
            journal.answer(AnswerSeen(call.tenant, call.id, 200, at, body))
            answer = answer_of(call.path, body)
            seen[call.id].ended = at
            seen[call.id].tokens = output_tokens(body, answer) if answer is not None else 0.0
    return seen


def _groups(reader: _Seen, seen: Mapping[str, _Seen]) -> Iterator[list[str]]:
    """Group the calls whose answers one reads by those that ran at the same time."""
    read = [
        seen[source]
        for source, kinds in reader.call.edges.items()
        if "continues" not in kinds and source in seen
    ]
    group: list[str] = []
    until = 0.0
    for each in sorted(read, key=lambda one: one.started):
        if each.started >= until:
            if len(group) > 1:
                yield group
            group = []
        group.append(each.call.id)
        until = max(until, each.ended or each.started)
    if len(group) > 1:
        yield group


def _returns(call: _Seen, readers: Iterable[_Seen]) -> bool:
    return any({"continues", "tool"} & set(each.call.edges[call.call.id]) for each in readers)


def _majorities(seen: Iterable[_Seen]) -> tuple[dict[str, str], dict[str, str]]:
    """The most common role of each template, and the other way round."""
    pairs = [(each.forecast.template, each.call.role) for each in seen if each.forecast is not None]
    return _most_common(pairs), _most_common((role, key) for key, role in pairs)


def _most_common(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for key, value in pairs:
        counts[key][value] += 1
    return {key: found.most_common(1)[0][0] for key, found in counts.items()}


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return fmean(values) if values else None
