"""The cases of `parrot-gateway bench engine`, each on one engine.

A decode step takes (time of N tokens - time of 1) / (N - 1), with the prompts in the prefix cache.
Every run is checked: each request must have got all of its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from parrot_bench.engine.device import Bounds
from parrot_bench.engine.load import run_requests
from parrot_bench.engine.prompts import Prompts, PromptSource, Sizes
from parrot_bench.engine.report import BenchError, CaseResult, Figure
from parrot_bench.engine.subjects import ParrotSubject, Subject

#: Prompts of one repetition.
_Make: TypeAlias = Callable[[int], Prompts]

#: One long prompt is filled so often.
_SINGLE_PREFILLS = 5


@dataclass(slots=True)
class Bench:
    """An engine, and the parameters of its measurement."""

    subject: Subject
    source: PromptSource
    sizes: Sizes
    bounds: Bounds | None
    repetitions: int = 2
    #: Mixed requests a second that the engine can do, once measured.
    capacity: float | None = None
    #: Steps of the shared case, for the ratio without sharing.
    shared_step_ms: float | None = field(default=None, repr=False)
    #: Greedy steps by batch, for the ratio of those that draw.
    greedy_step_ms: dict[int, float] = field(default_factory=dict, repr=False)

    def time_s(self, prompts: Prompts) -> float:
        """Seconds from submission to the last token.

        Raises:
            BenchError: the engine did not generate as many tokens as requested.
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

    def obstacle(self, prompts: Prompts, *, at_once: bool = True) -> str | None:
        """Say why the engine cannot run these prompts; None where it can.

        Args:
            prompts: to run.
            at_once: all prompts and outputs together must fit into the KV cache.
        """
        longest, room = self.subject.max_context_tokens, self.subject.cache_tokens
        if longest is not None and prompts.longest > longest:
            return f"contexts of {prompts.longest} tokens; the model allows {longest}"
        needed = prompts.num_distinct + prompts.num_output_tokens
        if at_once and room is not None and needed > room:
            return f"{needed} tokens; the KV cache holds {room}"
        return None

    def result(self, case: str, prompts: Prompts, *figures: Figure) -> CaseResult:
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
        return CaseResult(case, self.subject.name, skipped=reason)


#: Runs some cases and yields the result of each.
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

        result = _jobs(bench, case, make)
        if result.skipped is None:
            bench.greedy_step_ms[batch] = result.figure("step").median
        yield result


def _drawn(bench: Bench) -> Iterator[CaseResult]:
    """The same with temperature 0.8 and top-p 0.95."""
    sizes = bench.sizes
    for batch in sizes.drawn_batches:
        case = f"drawn-{batch}"

        def make(number: int, case: str = case, batch: int = batch) -> Prompts:
            made = bench.source.independent(case, number, batch, sizes.prompt, sizes.tokens)
            return made._replace(temperature=0.8, top_p=0.95)

        # Kernels of draws are compiled when they are first needed.
        bench.time_s(make(bench.repetitions).with_tokens(2))
        result = _jobs(bench, case, make)
        greedy_ms = bench.greedy_step_ms.get(batch)
        if result.skipped is None and greedy_ms is not None:
            ratio = Figure("over_greedy", "x", (result.figure("step").median / greedy_ms,))
            result = replace(result, figures=(*result.figures, ratio))
        yield result


def _trees(
    bench: Bench, case: str, root: int, *, roots: int = 1, groups: int = 1, branch: int = 0
) -> _Make:
    """Prompts of `sizes.sharers` leaves; see `PromptSource.tree`."""
    sizes = bench.sizes
    return lambda number: bench.source.tree(
        case,
        number,
        roots=roots,
        root=root,
        groups=groups,
        branch=branch,
        leaves=sizes.sharers,
        own=sizes.own,
        tokens=sizes.shared_tokens,
    )


def _shared(bench: Bench) -> Iterator[CaseResult]:
    result = _jobs(bench, "shared", _trees(bench, "shared", bench.sizes.shared))
    if result.skipped is None:
        bench.shared_step_ms = result.figure("step").median
    yield result


def _unshared(bench: Bench) -> Iterator[CaseResult]:
    subject = bench.subject
    if not isinstance(subject, ParrotSubject) or not subject.shares:
        yield bench.skip("unshared", "sharing cannot be switched off here")
        return
    with subject.without_sharing():
        make = _trees(bench, "unshared", bench.sizes.shared)
        result = _jobs(bench, "unshared", make, shares=False)
    if result.skipped is None and bench.shared_step_ms is not None:
        ratio = result.figure("step").median / bench.shared_step_ms
        gain = Figure("gain_of_sharing", "x", (ratio,))
        result = replace(result, figures=(*result.figures, gain))
    yield result


def _families(bench: Bench) -> Iterator[CaseResult]:
    sizes = bench.sizes
    make = _trees(bench, "families", sizes.shared, roots=sizes.families)
    yield _jobs(bench, "families", make)


def _tree(bench: Bench) -> Iterator[CaseResult]:
    sizes = bench.sizes
    make = _trees(bench, "tree", sizes.root, groups=sizes.groups, branch=sizes.branch)
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


def _long(bench: Bench) -> Iterator[CaseResult]:
    """One long prompt: the time to its first token, and the steps behind it."""
    sizes = bench.sizes
    made = [
        bench.source.independent("long", number, 1, sizes.long, sizes.long_tokens)
        for number in range(bench.repetitions)
    ]
    obstacle = bench.obstacle(made[0])
    if obstacle is not None:
        yield bench.skip("long", obstacle)
        return
    bench.time_s(bench.source.independent("long-before", 0, 1, sizes.long // 3, 4))
    first, steps = [], []
    for prompts in made:
        first.append(1000 * bench.time_s(prompts.with_tokens(1)))
        one = bench.time_s(prompts.with_tokens(1))
        steps.append(1000 * (bench.time_s(prompts) - one) / (sizes.long_tokens - 1))
    fill_ms = step_ms = None
    if bench.bounds is not None:
        fill_ms = 1000 * bench.bounds.prefill_s(made[0].segments, 1)
        step_ms = 1000 * bench.bounds.step_s(1, sizes.long, sizes.long)
    yield bench.result(
        "long",
        made[0],
        Figure("first_token", "ms", tuple(first), fill_ms),
        Figure("step", "ms", tuple(steps), step_ms),
    )


def _measure_mixed(bench: Bench) -> CaseResult:
    # Once: it is long enough to be steady.
    prompts = bench.source.mixed("mixed", 0, bench.sizes.requests, bench.sizes)
    obstacle = bench.obstacle(prompts, at_once=False)
    if obstacle is not None:
        return bench.skip("mixed", obstacle)
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
        timings = run_requests(subject.llm, prompts, arrivals)
        first = _percentiles_ms([timing.first_s for timing in timings])
        between = _percentiles_ms([gap for timing in timings for gap in timing.between_s])
        wall_s = max(timing.tokens[-1] for timing in timings) - timings[0].arrival
        yield bench.result(
            case,
            prompts,
            Figure("arrivals", "req/s", (rate,)),
            Figure("first_token_p50", "ms", (first[0],)),
            Figure("first_token_p99", "ms", (first[1],)),
            Figure("between_tokens_p50", "ms", (between[0],)),
            Figure("between_tokens_p99", "ms", (between[1],)),
            Figure("output", "tok/s", (prompts.num_output_tokens / wall_s,)),
        )


def _percentiles_ms(seconds: list[float]) -> tuple[float, float]:
    median, high = np.percentile(seconds, (50, 99)) if seconds else (0.0, 0.0)
    return 1000 * float(median), 1000 * float(high)


#: By the names of `--cases`, in the order in which they run.
GROUPS: dict[str, _Group] = {
    "decode": _decode,
    "drawn": _drawn,
    "shared": _shared,
    "unshared": _unshared,
    "families": _families,
    "tree": _tree,
    "prefill": _prefill,
    "long": _long,
    "mixed": _mixed,
    "load": _load,
}


def warm_up(bench: Bench) -> None:
    """Compile and allocate what a first request would: none of the cases' prompts."""
    sizes = bench.sizes
    for count, length in ((1, sizes.prompt), (max(sizes.batches), 8), (1, sizes.prefill)):
        prompts = bench.source.independent("warm-up", length, count, length, 4)
        if bench.obstacle(prompts) is None:
            bench.time_s(prompts)


def run_cases(bench: Bench, names: list[str]) -> Iterator[CaseResult]:
    """The results of the cases of some groups, each as it ends."""
    warm_up(bench)
    for name, group in GROUPS.items():
        if name in names:
            yield from group(bench)
