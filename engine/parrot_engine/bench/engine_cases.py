"""The cases of `parrot-gateway bench engine`, each on one engine.

A decode step takes (time of N tokens - time of 1) / (N - 1), with the prompts in the prefix cache.
Every run is checked: each request must have got as many tokens as it asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from parrot_engine.bench.engine_bounds import Bounds
from parrot_engine.bench.engine_copilot import (
    PRINTED_ALONE,
    PRINTED_PAGED,
    copilot_prompts,
    mean_ms,
    needed_tokens,
    run_slots,
)
from parrot_engine.bench.engine_load import run_load
from parrot_engine.bench.engine_prompts import Prompts, PromptSource, Sizes
from parrot_engine.bench.engine_results import BenchError, CaseResult, Figure
from parrot_engine.bench.engine_subjects import ParrotSubject, Subject

#: Prompts of one repetition.
_Make: TypeAlias = Callable[[int], Prompts]

#: One long prompt is filled so often.
_SINGLE_PREFILLS = 5


@dataclass(slots=True)
class Bench:
    """An engine, and how it is measured."""

    subject: Subject
    source: PromptSource
    sizes: Sizes
    bounds: Bounds | None
    repetitions: int = 2
    #: Mixed requests a second that the engine can do, once measured.
    capacity: float | None = None
    #: Steps of the shared case, for the ratio without sharing.
    shared_step_ms: float | None = field(default=None, repr=False)

    def time_s(self, prompts: Prompts) -> float:
        """Seconds from submission to the last token.

        Raises:
            BenchError: an engine did not generate what it was asked for.
        """
        begin = time.perf_counter()
        counts = self.subject.generate(prompts)
        elapsed = time.perf_counter() - begin
        if counts != prompts.max_tokens:
            raise BenchError(
                f"{self.subject.name} generated {sum(counts)} tokens instead of "
                f"{prompts.num_output_tokens}"
            )
        return elapsed

    def obstacle(self, prompts: Prompts) -> str | None:
        """Why the engine cannot hold these prompts."""
        longest, room = self.subject.max_context_tokens, self.subject.cache_tokens
        if longest is not None and prompts.longest > longest:
            return f"contexts of {prompts.longest} tokens; the model allows {longest}"
        needed = prompts.num_distinct + prompts.num_output_tokens
        if room is not None and needed > room:
            return f"{needed} tokens; the KV cache holds {room}"
        return None

    def result(self, case: str, prompts: Prompts, *figures: Figure) -> CaseResult:
        """The outcome of runs of such prompts."""
        return CaseResult(
            case,
            self.subject.name,
            requests=len(prompts.token_ids),
            prompt_tokens=prompts.num_prompt_tokens,
            distinct_tokens=prompts.num_distinct,
            output_tokens=prompts.num_output_tokens,
            figures=figures,
        )

    def skip(self, case: str, reason: str) -> CaseResult:
        """A case that cannot be run."""
        return CaseResult(case, self.subject.name, skipped=reason)


#: Runs some cases and tells of each.
_Group: TypeAlias = Callable[[Bench], Iterator[CaseResult]]


def _jobs(bench: Bench, case: str, make: _Make, *, shares: bool = True) -> CaseResult:
    """Requests that arrive together: as they come first, and with their prompts cached."""
    prompts = make(0)
    obstacle = bench.obstacle(prompts)
    if obstacle is not None:
        return bench.skip(case, obstacle)
    tokens, rows = prompts.max_tokens[0], len(prompts.token_ids)
    first, cached, steps = [], [], []
    for number in range(bench.repetitions):
        prompts = make(number)
        first.append(bench.time_s(prompts))
        one = bench.time_s(prompts.with_tokens(1))
        cached.append(bench.time_s(prompts))
        steps.append(1000 * (cached[-1] - one) / (tokens - 1))
    step_s = fill_s = None
    if bench.bounds is not None:
        written = rows * tokens / 2
        attended = prompts.num_prompt_tokens + written
        read = prompts.num_distinct + written if shares else attended
        step_s = bench.bounds.step_s(rows, read, attended)
        fill_s = bench.bounds.prefill_s(prompts.segments, rows)
    all_steps_s = None if step_s is None else (tokens - 1) * step_s
    whole_s = None if all_steps_s is None or fill_s is None else fill_s + all_steps_s
    return bench.result(
        case,
        prompts,
        Figure("step", "ms", tuple(steps), None if step_s is None else 1000 * step_s),
        _rate("first_time", prompts, first, whole_s),
        _rate("cached", prompts, cached, all_steps_s),
    )


def _rate(name: str, prompts: Prompts, times: list[float], bound_s: float | None) -> Figure:
    tokens = prompts.num_output_tokens
    bound = None if bound_s is None else tokens / bound_s
    return Figure(name, "tok/s", tuple(tokens / elapsed for elapsed in times), bound)


def _decode(bench: Bench) -> Iterator[CaseResult]:
    sizes = bench.sizes
    for batch in sizes.batches:
        case = f"decode-{batch}"

        def make(number: int, case: str = case, batch: int = batch) -> Prompts:
            return bench.source.independent(case, number, batch, sizes.prompt, sizes.tokens)

        yield _jobs(bench, case, make)


def _make_shared(bench: Bench, case: str, families: int) -> _Make:
    sizes = bench.sizes

    def make(number: int) -> Prompts:
        return bench.source.tree(
            case,
            number,
            roots=families,
            root=sizes.shared,
            leaves=sizes.sharers,
            own=sizes.own,
            tokens=sizes.shared_tokens,
        )

    return make


def _shared(bench: Bench) -> Iterator[CaseResult]:
    result = _jobs(bench, "shared", _make_shared(bench, "shared", 1))
    if result.skipped is None:
        bench.shared_step_ms = result.figure("step").median
    yield result


def _unshared(bench: Bench) -> Iterator[CaseResult]:
    subject = bench.subject
    if not isinstance(subject, ParrotSubject) or not subject.shares:
        yield bench.skip("unshared", "sharing cannot be switched off here")
        return
    with subject.without_sharing():
        result = _jobs(bench, "unshared", _make_shared(bench, "unshared", 1), shares=False)
    if result.skipped is None and bench.shared_step_ms is not None:
        ratio = result.figure("step").median / bench.shared_step_ms
        gain = Figure("gain_of_sharing", "x", (ratio,))
        result = replace(result, figures=(*result.figures, gain))
    yield result


def _families(bench: Bench) -> Iterator[CaseResult]:
    yield _jobs(bench, "families", _make_shared(bench, "families", bench.sizes.families))


def _tree(bench: Bench) -> Iterator[CaseResult]:
    sizes = bench.sizes

    def make(number: int) -> Prompts:
        return bench.source.tree(
            "tree",
            number,
            roots=1,
            root=sizes.root,
            groups=sizes.groups,
            branch=sizes.branch,
            leaves=sizes.sharers,
            own=sizes.own,
            tokens=sizes.shared_tokens,
        )

    yield _jobs(bench, "tree", make)


def _prefill(bench: Bench) -> Iterator[CaseResult]:
    """Prompts that are new each time, and one token of each."""
    sizes = bench.sizes
    for case, count, runs in (
        (f"prefill-{sizes.prefills}", sizes.prefills, bench.repetitions),
        ("prefill-1", 1, _SINGLE_PREFILLS),
    ):
        made = [
            bench.source.independent(case, number, count, sizes.prefill, 1)
            for number in range(runs)
        ]
        obstacle = bench.obstacle(made[0])
        if obstacle is not None:
            yield bench.skip(case, obstacle)
            continue
        times = [bench.time_s(prompts) for prompts in made]
        bound = None
        if bench.bounds is not None:
            bound = bench.bounds.prefill_s(made[0].segments, count)
        tokens = made[0].num_prompt_tokens
        rate = Figure(
            "prompt_tokens",
            "tok/s",
            tuple(tokens / elapsed for elapsed in times),
            None if bound is None else tokens / bound,
        )
        last = Figure(
            "last_first_token",
            "ms",
            tuple(1000 * elapsed for elapsed in times),
            None if bound is None else 1000 * bound,
        )
        yield bench.result(case, made[0], rate, last)


def _measure_mixed(bench: Bench) -> CaseResult:
    # Once: it is long enough to be steady.
    prompts = bench.source.mixed("mixed", 0, bench.sizes.requests, bench.sizes)
    longest = bench.subject.max_context_tokens
    if longest is not None and prompts.longest > longest:
        return bench.skip("mixed", f"contexts of {prompts.longest}; the model allows {longest}")
    elapsed = bench.time_s(prompts)
    bench.capacity = len(prompts.token_ids) / elapsed
    return bench.result(
        "mixed",
        prompts,
        _rate("first_time", prompts, [elapsed], None),
        Figure("requests", "req/s", (bench.capacity,)),
    )


def _mixed(bench: Bench) -> Iterator[CaseResult]:
    yield _measure_mixed(bench)


def _load(bench: Bench) -> Iterator[CaseResult]:
    sizes, subject = bench.sizes, bench.subject
    if not isinstance(subject, ParrotSubject):
        yield bench.skip("load", "measured for this engine only")
        return
    if bench.capacity is None:
        skipped = _measure_mixed(bench).skipped
        if skipped is not None:
            yield bench.skip("load", skipped)
            return
    assert bench.capacity is not None
    for load in sizes.loads:
        case = f"load-{100 * load:.0f}"
        rate = load * bench.capacity
        count = max(4, round(rate * sizes.load_s))
        prompts = bench.source.mixed(case, 0, count, sizes)
        arrivals = bench.source.arrivals(case, 1, count, rate)
        outcome = run_load(subject.llm, prompts, arrivals)
        first, between = (
            outcome.percentiles_ms(values) for values in (outcome.first, outcome.between)
        )
        yield bench.result(
            case,
            prompts,
            Figure("arrivals", "req/s", (rate,)),
            Figure("first_token_p50", "ms", (first[0],)),
            Figure("first_token_p99", "ms", (first[1],)),
            Figure("between_tokens_p50", "ms", (between[0],)),
            Figure("between_tokens_p99", "ms", (between[1],)),
            Figure("output", "tok/s", (outcome.output_tokens / outcome.wall_s,)),
        )


def _copilot(bench: Bench) -> Iterator[CaseResult]:
    """The paper's figure 14, with its printed ratios."""
    subject = bench.subject
    if not isinstance(subject, ParrotSubject):
        yield bench.skip("copilot", "measured for this engine only")
        return
    for slots in bench.sizes.slots:
        case, shared_ms = f"copilot-{slots}", 0.0
        for way, printed in (("", {}), ("-paged", PRINTED_PAGED), ("-alone", PRINTED_ALONE)):
            alone = way == "-alone"
            prompts = copilot_prompts(bench.source, bench.sizes, case + way, alone=alone)
            if way == "-paged" and not subject.shares:
                yield bench.skip(case + way, "sharing cannot be switched off here")
                continue
            room, needed = subject.cache_tokens, needed_tokens(prompts, slots, alone=alone)
            longest = subject.max_context_tokens
            if longest is not None and prompts.longest > longest:
                yield bench.skip(case + way, f"contexts of {prompts.longest}; allowed {longest}")
                continue
            if room is not None and needed > room:
                yield bench.skip(case + way, f"{needed} tokens; the KV cache holds {room}")
                continue
            with subject.without_sharing() if way == "-paged" else nullcontext():
                latency_ms = mean_ms(run_slots(subject.llm, prompts, slots))
            figures = [Figure("latency_mean", "ms", (latency_ms,))]
            shared_ms = shared_ms or latency_ms
            if way:
                figures.append(Figure("over_shared", "x", (latency_ms / shared_ms,)))
            if slots in printed:
                figures.append(Figure("printed_in_paper", "x", (printed[slots],)))
            yield bench.result(case + way, prompts, *figures)


#: By the names of `--cases`, in the order in which they run.
GROUPS: dict[str, _Group] = {
    "decode": _decode,
    "shared": _shared,
    "unshared": _unshared,
    "families": _families,
    "tree": _tree,
    "prefill": _prefill,
    "mixed": _mixed,
    "load": _load,
    "copilot": _copilot,
}


def warm_up(bench: Bench) -> None:
    """Compile and allocate what a first request would: none of the cases' prompts."""
    sizes = bench.sizes
    for count, length in ((1, sizes.prompt), (max(sizes.batches), 8), (1, sizes.prefill)):
        prompts = bench.source.independent("warm-up", length, count, length, 4)
        if bench.obstacle(prompts) is None:
            bench.time_s(prompts)


def run_cases(bench: Bench, names: list[str]) -> Iterator[CaseResult]:
    """The cases of some groups, each told as it ends."""
    warm_up(bench)
    for name, group in GROUPS.items():
        if name in names:
            yield from group(bench)
