"""Many tenants on the same engines, some large, one that floods. Not from the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate, takewhile

from parrot_scheduler.task import LATENCY, THROUGHPUT

from parrot_bench.applications.figures import chat_lengths
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Segment, one_call
from parrot_bench.simulator.workloads.base import Generator, poisson


@dataclass(slots=True, kw_only=True)
class Tenants(Generator):
    """Single calls of many tenants, whose rates fall as 1 / rank (Zipf).

    Each tenant has a system prompt of 1,500 tokens of its own, then the lengths of a chat
    (`chat_lengths`). One more tenant, `flood`, sends nothing for the first quarter of the time,
    `flood_rate` calls a second over the middle half, and nothing in the last quarter. A first
    token is on time within 2 s; results are reported by kind: `tenant` and `flood`.
    """

    name: str = "tenants"
    tenants: int = 50
    #: Calls a second of all tenants but the flooding one.
    rate: float = 20.0
    flood_rate: float = 60.0
    duration_s: float = 120.0

    def arrivals(self) -> Iterator[ApplicationPlan]:
        yield from merge(self._regular(), self._flood(), key=lambda plan: plan.arrival_s)

    def _regular(self) -> Iterator[ApplicationPlan]:
        random = self.random("regular")
        cumulative = list(accumulate(1.0 / rank for rank in range(1, self.tenants + 1)))
        names = range(self.tenants)
        times = takewhile(lambda now: now < self.duration_s, poisson(random, self.rate))
        for number, now in enumerate(times):
            tenant = random.choices(names, cum_weights=cumulative)[0]
            lengths = chat_lengths(random)
            yield self._plan(f"call-{number}", f"tenant-{tenant}", "tenant", now, lengths)

    def _flood(self) -> Iterator[ApplicationPlan]:
        if self.flood_rate == 0:
            return
        random = self.random("flood")
        length = self.duration_s / 2
        times = takewhile(lambda now: now < length, poisson(random, self.flood_rate))
        for number, now in enumerate(times):
            arrival_s = self.duration_s / 4 + now
            lengths = chat_lengths(random)
            yield self._plan(f"flood-{number}", "flood", "flood", arrival_s, lengths)

    def _plan(
        self, name: str, tenant: str, kind: str, arrival_s: float, lengths: tuple[int, int]
    ) -> ApplicationPlan:
        prompt, output = lengths
        return one_call(
            name,
            arrival_s,
            (
                Segment(("system", tenant), self.tokens(1500)),
                Segment(("own", name), self.tokens(prompt)),
            ),
            self.tokens(output),
            template=tenant,
            tenant=tenant,
            kind=kind,
            ttft_s=2.0,
        )


@dataclass(slots=True, kw_only=True)
class Sessions(Generator):
    """One tenant with very many sessions beside tenants with one each. Not from the paper.

    A session has `turns` calls; each reads all before it and 400 tokens more, generates 150, and is
    followed by a pause of up to `pause_s`. All sessions begin within `duration_s`, evenly. Results
    are reported by kind: `tenant`, and `crowd` for the large one.
    """

    name: str = "sessions"
    #: Of the large tenant; 0: it is not there.
    sessions: int = 1000
    tenants: int = 20
    turns: int = 3
    pause_s: float = 2.0
    duration_s: float = 10.0

    def arrivals(self) -> Iterator[ApplicationPlan]:
        crowd = self._sessions("crowd", self.sessions, lambda number: "crowd")
        others = self._sessions("tenant", self.tenants, lambda number: f"tenant-{number}")
        yield from merge(crowd, others, key=lambda plan: plan.arrival_s)

    def _sessions(
        self, kind: str, count: int, tenant: Callable[[int], str]
    ) -> Iterator[ApplicationPlan]:
        for number in range(count):
            arrival_s = self.duration_s * number / count
            yield self._session(f"{kind}-{number}", kind, tenant(number), arrival_s)

    def _session(self, name: str, kind: str, tenant: str, arrival_s: float) -> ApplicationPlan:
        random = self.random(name)
        prompt = [Segment(("system", tenant), self.tokens(1000))]
        output = self.tokens(150)
        calls = []
        for index in range(self.turns):
            prompt.append(Segment(("turn", name, index), self.tokens(400)))
            calls.append(
                CallPlan(
                    index=index,
                    prompt=tuple(prompt),
                    output_tokens=output,
                    max_tokens=output,
                    after=(index - 1,) if index else (),
                    pause_s=self.pause_s * random.random() if index else 0.0,
                    template=tenant,
                    objective=LATENCY,
                )
            )
            prompt.append(Segment(("output", name, index), output))
        return ApplicationPlan(name, arrival_s, tuple(calls), tenant=tenant, kind=kind)


@dataclass(slots=True, kw_only=True)
class Backlog(Generator):
    """Long and short applications of one tenant, faster than an engine takes them. Not from the
    paper.

    One application in `long_every` is a chain of `long_calls` calls, the others are two calls;
    each call has a prompt of 1,000 tokens of its own and generates 200. Nobody waits for single
    calls. Who serves the short ones first has the shorter mean, and the long ones lose little.
    """

    name: str = "backlog"
    rate: float = 8.0
    count: int = 400
    long_every: int = 4
    long_calls: int = 16

    def arrivals(self) -> Iterator[ApplicationPlan]:
        random = self.random()
        times = poisson(random, self.rate)
        for number in range(self.count):
            is_long = random.random() < 1 / self.long_every
            name = f"job-{number}"
            length = self.long_calls if is_long else 2
            calls = tuple(
                CallPlan(
                    index=index,
                    prompt=(Segment(("own", name, index), self.tokens(1000)),),
                    output_tokens=self.tokens(200),
                    max_tokens=self.tokens(200),
                    after=(index - 1,) if index else (),
                    template="long" if is_long else "short",
                    objective=THROUGHPUT,
                    successors=length - 1 - index,
                )
                for index in range(length)
            )
            yield ApplicationPlan(
                id=name, arrival_s=next(times), calls=calls, kind="long" if is_long else "short"
            )


@dataclass(slots=True, kw_only=True)
class HotPrefix(Generator):
    """One popular prompt of 6,000 tokens beside calls that share nothing. Not from the paper.

    `hot_share` of all calls begin with the popular prompt. Chasing its cache puts half of all
    work on one engine; ignoring it computes it everywhere again and again. All calls have the
    lengths of a chat besides; a first token is on time within 2 s.
    """

    name: str = "hot-prefix"
    rate: float = 20.0
    count: int = 2000
    hot_share: float = 0.5

    def arrivals(self) -> Iterator[ApplicationPlan]:
        random = self.random()
        times = poisson(random, self.rate)
        for number in range(self.count):
            is_hot = random.random() < self.hot_share
            prompt, output = chat_lengths(random)
            name = f"call-{number}"
            own = Segment(("own", name), self.tokens(prompt))
            yield one_call(
                name,
                next(times),
                (Segment("hot", self.tokens(6000)), own) if is_hot else (own,),
                self.tokens(output),
                template="hot" if is_hot else "chat",
                kind="hot" if is_hot else "other",
                ttft_s=2.0,
            )
