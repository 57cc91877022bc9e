"""Profiles of each template's calls, learned from links and answers, and forgotten slowly.

A profile has the lengths of answers, whether and when they are used again, the templates of the
calls that use them, and whether several are read together. It has no text.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter

from parrot_scheduler.lengths import FadingHistogram

from parrot_gateway.linking.linker.conversation import Answer
from parrot_gateway.linking.linker.links import Link, LinkedSession
from parrot_gateway.linking.profiles.forecast import ENOUGH, Forecast, TemplateForecast
from parrot_gateway.linking.profiles.templates import Template, TemplateLearner, prompt_of

#: Maximum calls of a tenant whose answers may still be used.
_MAX_CALLS = 10_000
#: Time after which an unused answer counts as not used; later uses still count. If the gaps of its
#: template are known, it is a multiple of the long ones, within these limits.
_UNUSED_S = 60.0
_UNUSED_GAPS = 4.0
_LEAST_UNUSED_S, _MOST_UNUSED_S = 10.0, 300.0
#: When a count passes this, all shares are halved, so that old calls fade.
_MAX_WEIGHT = 256.0
#: Maximum templates of one template's successors, and of one call's readers.
_MAX_SUCCESSORS = 16
_MAX_TOLD = 8
#: Bytes at either end of an answer that are searched for its usage.
_USAGE_BYTES = 2048
_USAGE_KEYS = (b'"completion_tokens":', b'"output_tokens":')
_USAGE = re.compile(rb"\s*(\d{1,9})\b")
#: Characters per token if the answer does not state its tokens.
_CHARACTERS_A_TOKEN = 4


def output_tokens(body: bytes, answer: Answer) -> float:
    """Return the tokens of one choice of an answer, from its usage or estimated from its text.

    Args:
        body: the answer as sent, JSON or server-sent events.
        answer: its parsed form.
    """
    end = len(body)
    found = answer.tokens
    if found is None:
        found = _usage_in(body, max(0, end - _USAGE_BYTES), end)
    if found is None and end > _USAGE_BYTES:
        found = _usage_in(body, 0, _USAGE_BYTES)
    if found is not None:
        tokens = float(found)
    else:
        texts = [choice.text for choice in answer.choices]
        texts += [call.arguments for choice in answer.choices for call in choice.tool_calls]
        tokens = sum(map(len, texts)) / _CHARACTERS_A_TOKEN
    return tokens / max(1, len(answer.choices))


def _usage_in(body: bytes, start: int, end: int) -> int | None:
    """Return the last number of output tokens in a part of an answer."""
    while True:
        at = max(body.rfind(key, start, end) for key in _USAGE_KEYS)
        if at < 0:
            return None
        found = _USAGE.match(body, body.index(b":", at) + 1)
        if found is not None:
            return int(found[1])
        end = at


@dataclass(slots=True, eq=False)
class Profile:
    """Counts of one template's calls; old ones fade.

    Attributes:
        lengths: of answers, in tokens.
        gaps: from an answer to the first call that uses it, in milliseconds.
        calls: number whose answer was used or never will be.
        returned: number of these that another call continued.
        in_fan_in: number of these read together with answers of concurrent calls.
        fan_in: sum of the answers that their readers read; `siblings`: those of this template.
        successors: by template of the calls that use answers: number of calls with such a user,
            and number of users.
        unused_s: time after which an answer counts as not used.
        is_outer: true if longer templates begin with this one.
    """

    template: Template
    lengths: FadingHistogram = field(default_factory=FadingHistogram)
    gaps: FadingHistogram = field(default_factory=FadingHistogram)
    calls: float = 0.0
    returned: float = 0.0
    in_fan_in: float = 0.0
    fan_in: float = 0.0
    siblings: float = 0.0
    successors: dict[str, tuple[float, float]] = field(default_factory=dict)
    unused_s: float = _UNUSED_S
    is_outer: bool = False

    def settle(self) -> None:
        """Count a call whose outcome is known."""
        self.calls += 1.0
        if self.calls > _MAX_WEIGHT:
            self.calls /= 2
            self.returned /= 2
            self.in_fan_in /= 2
            self.fan_in /= 2
            self.siblings /= 2
            self.successors = {
                key: (calls / 2, total / 2)
                for key, (calls, total) in self.successors.items()
                if calls >= 0.5
            }

    def succeed(self, key: str, is_first: bool) -> None:
        """Count a call that uses an answer; `is_first` if it is the first of its template to do
        so.
        """
        calls, total = self.successors.get(key, (0.0, 0.0))
        if key not in self.successors and len(self.successors) >= _MAX_SUCCESSORS:
            del self.successors[min(self.successors, key=lambda each: self.successors[each])]
        self.successors[key] = calls + is_first, total + 1.0

    def forecast(self) -> Forecast:
        lengths, gaps, calls = self.lengths, self.gaps, max(self.calls, 1.0)
        gap_s = gaps.quantile(0.5) / 1000, gaps.quantile(0.9) / 1000
        if gaps.weight >= ENOUGH:
            self.unused_s = min(max(_UNUSED_GAPS * gap_s[1], _LEAST_UNUSED_S), _MOST_UNUSED_S)
        successors = sorted(
            (
                (key, min(1.0, having / calls), total / having)
                for key, (having, total) in self.successors.items()
                if having
            ),
            key=lambda each: -each[1],
        )
        return Forecast(
            self.template.key,
            lengths.weight,
            (lengths.quantile(0.5), lengths.quantile(0.9)),
            min(1.0, self.in_fan_in / calls),
            self.fan_in / self.in_fan_in if self.in_fan_in else 0.0,
            self.siblings / self.in_fan_in if self.in_fan_in else 0.0,
            min(1.0, self.returned / calls),
            gap_s,
            tuple(successors[:8]),
            self.calls,
            self.is_outer,
            self.template.length,
        )


@dataclass(slots=True, eq=False)
class _Call:
    """A call whose answer may still be used.

    Attributes:
        profiles: profiles of its templates that learn from it, longest template first.
        told: templates of the calls that have used its answer.
    """

    id: str
    profiles: Sequence[Profile]
    started: float
    ended: float | None = None
    is_settled: bool = False
    has_returned: bool = False
    in_fan_in: bool = False
    told: dict[str, None] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the key of the longest template."""
        return self.profiles[0].template.key


class TenantProfiles:
    """Learns the templates of one tenant and the behaviour of their calls.

    Args:
        max_templates: maximum number; the least recently used make room.
    """

    def __init__(self, max_templates: int) -> None:
        self._max_templates = max_templates
        self._learner = TemplateLearner()
        self._profiles: OrderedDict[str, Profile] = OrderedDict()
        self._calls: OrderedDict[str, _Call] = OrderedDict()
        #: Answered calls, by the time at which they count as not used.
        self._answered: list[tuple[float, int, _Call]] = []
        self._numbers = count()
        #: The last request and its prompt, because equal requests come in a row.
        self._last = b"", b""
        self._changed: dict[str, None] = {}
        self._removed: dict[str, None] = {}

    def request(
        self,
        call: str,
        body: bytes,
        links: Iterable[Link],
        session: LinkedSession,
        now: float,
        *,
        is_new: bool = True,
    ) -> None:
        """Learn from the request of a call.

        Args:
            call: its id.
            links: to earlier calls.
            session: session of the call, if known.
            now: seconds; never goes back.
            is_new: false for one of many equal prompts, which add nothing about templates.
        """
        if body is not self._last[0]:
            self._last = body, prompt_of(body)
        prompt = self._last[1]
        links = list(links)
        if is_new and prompt and all(link.kind not in ("continues", "tool") for link in links):
            for key, instead in self._learner.learn(prompt, session, now):
                self._replace(key, instead)
        self._settle_old(now)
        seen = _Call(call, self._of(prompt), now)
        if seen.profiles:
            self._calls[call] = seen
            if len(self._calls) > _MAX_CALLS:
                self._calls.popitem(last=False)
        if links:
            self._use(links, seen, now)

    def answer(self, call: str, tokens: float, now: float) -> None:
        """Learn from a call's complete answer, with `tokens` per choice."""
        seen = self._calls.get(call)
        if seen is not None and seen.ended is None:
            seen.ended = now
            for profile in seen.profiles:
                profile.lengths.add(tokens)
                self._changed[profile.template.key] = None
            due = now + seen.profiles[0].unused_s
            heappush(self._answered, (due, next(self._numbers), seen))

    def drop(self, call: str) -> None:
        """Forget a call that has failed."""
        seen = self._calls.pop(call, None)
        if seen is not None:
            seen.is_settled = True

    def template_of(self, call: str) -> str:
        """Return the template of a call; empty if it has none or is forgotten."""
        seen = self._calls.get(call)
        return "" if seen is None else seen.key

    def profiles(self) -> Iterator[Profile]:
        """Iterate over the profiles of all templates, least recently used first."""
        return iter(self._profiles.values())

    def restore(self, profile: Profile) -> None:
        """Restore a profile learned before, if there is room."""
        key = profile.template.key
        if len(self._profiles) < self._max_templates and self._learner.table.add(profile.template):
            self._profiles[key] = profile
            self._changed[key] = None

    def __len__(self) -> int:
        """Return the number of templates."""
        return len(self._profiles)

    @property
    def size_bytes(self) -> int:
        """Return their approximate bytes."""
        return self._learner.size_bytes + 2000 * len(self._profiles) + 400 * len(self._calls)

    @property
    def has_changed(self) -> bool:
        """Return true if there are changes."""
        return bool(self._changed or self._removed)

    def changes(self, most: int) -> tuple[list[TemplateForecast], list[str]]:
        """Return the changes since the last call, of at most `most` templates, and the keys of
        forgotten ones.
        """
        changed: list[TemplateForecast] = []
        while self._changed and len(changed) < most:
            key = next(iter(self._changed))
            del self._changed[key]
            profile = self._profiles.get(key)
            if profile is not None:
                changed.append(TemplateForecast(profile.template, profile.forecast()))
        removed, self._removed = list(self._removed), {}
        return changed, removed

    def _of(self, prompt: bytes) -> Sequence[Profile]:
        """Return the profiles that learn from a prompt: that of its longest template, then shorter
        ones up to the first with enough calls.
        """
        found: list[Profile] = []
        templates = self._learner.table.find(prompt) if prompt else []
        for template in templates[:-1]:
            outer = self._profiles.get(template.key)
            if outer is not None and not outer.is_outer:
                outer.is_outer = True
                self._changed[template.key] = None
        for template in reversed(templates):
            profile = self._profiles.get(template.key)
            if profile is None:
                profile = self._profiles[template.key] = Profile(template)
                self._removed.pop(template.key, None)
                if len(self._profiles) > self._max_templates:
                    self._forget(next(iter(self._profiles)))
            else:
                self._profiles.move_to_end(template.key)
            found.append(profile)
            if profile.lengths.weight >= ENOUGH:
                break
        return found

    def _forget(self, key: str) -> None:
        if self._profiles.pop(key, None) is not None:
            self._learner.table.remove(key)
            self._changed.pop(key, None)
            self._removed[key] = None

    def _replace(self, key: str, instead: str) -> None:
        """Remove a template; its profile moves to the replacing template if that knows less."""
        profile = self._profiles.get(key)
        other = self._profiles.get(instead)
        if profile is not None and other is not None:
            if profile.lengths.weight > other.lengths.weight:
                profile.template = other.template
                self._profiles[instead] = profile
            self._changed[instead] = None
        self._forget(key)

    def _use(self, links: Iterable[Link], reader: _Call, now: float) -> None:
        """Count a call in the profiles of the answers that it uses."""
        kinds: dict[str, bool] = {}
        for link in links:
            kinds[link.source] = link.kind in ("continues", "tool") or kinds.get(link.source, False)
        read: list[_Call] = []
        key = reader.key if reader.profiles else ""
        for name, is_return in kinds.items():
            source = self._calls.get(name)
            if source is None:
                continue
            if not is_return:
                read.append(source)
            for profile in source.profiles:
                self._changed[profile.template.key] = None
                if not source.is_settled:
                    profile.settle()
                    if source.ended is not None:
                        profile.gaps.add(1000 * max(0.0, now - source.ended))
                if is_return and not source.has_returned:
                    profile.returned += 1.0
                if key:
                    profile.succeed(key, key not in source.told)
            source.is_settled = True
            source.has_returned = source.has_returned or is_return
            if key and len(source.told) < _MAX_TOLD:
                source.told[key] = None
        if len(read) > 1:
            self._fan_in(read)

    def _fan_in(self, read: list[_Call]) -> None:
        """Count answers that one call reads; concurrent calls form one group."""
        group: list[_Call] = []
        until = 0.0
        for call in [*sorted(read, key=attrgetter("started")), None]:
            if call is not None and group and call.started < until:
                group.append(call)
                until = max(until, call.ended or until)
                continue
            if len(group) > 1:
                keys = [each.key for each in group]
                for each, key in zip(group, keys, strict=True):
                    if not each.in_fan_in:
                        each.in_fan_in = True
                        for profile in each.profiles:
                            profile.in_fan_in += 1.0
                            profile.fan_in += len(group)
                            profile.siblings += keys.count(key)
            if call is not None:
                group, until = [call], call.ended or call.started

    def _settle_old(self, now: float) -> None:
        """Settle the calls that nobody used in time."""
        waiting = self._answered
        while waiting and (waiting[0][0] <= now or len(waiting) > _MAX_CALLS):
            call = heappop(waiting)[2]
            if not call.is_settled:
                call.is_settled = True
                for profile in call.profiles:
                    profile.settle()
                    self._changed[profile.template.key] = None
