"""The paper's chat assistant behind one long prompt (OSDI '24, figure 14), on this engine.

64 requests share a system prompt of 5,107 tokens; so many slots run at once, and a slot takes the
next request when its last one has ended. Lengths of the prompts follow the recorded quantiles,
outputs are the recorded ones; token ids are random. The paper ran LLaMA 7B on one A100: the shape
`llama-7b` has its sizes.

Three ways, as there: the prompt is held once and attention reads it once (`shared`); it is held
once and each row reads it for itself (`paged`); each request has a prompt of its own (`alone`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from parrot_engine.bench.engine_prompts import Prompts, PromptSource, Sizes
from parrot_engine.bench.engine_results import BenchError
from parrot_engine.bench.engine_subjects import greedy
from parrot_engine.llm import LLM, Request

#: One run may take so long.
_TIMEOUT_S = 600.0


class Copilot(NamedTuple):
    """Sizes of the experiment."""

    system: int
    #: Quantiles of prompts' lengths, the system prompt included: (share, tokens).
    lengths: tuple[tuple[float, int], ...]
    #: Lengths of outputs, each with how many requests have it.
    outputs: tuple[tuple[int, int], ...]


RECORDED = Copilot(
    5107,
    ((0, 5224), (0.1, 5310), (0.25, 5999), (0.5, 6148), (0.75, 6314), (0.9, 6827), (1, 7492)),
    (
        *((183, 2), (191, 3), (192, 4), (195, 3), (196, 2), (209, 4), (212, 3), (232, 7)),
        *((248, 2), (251, 2), (256, 1), (269, 3), (303, 1), (313, 1), (351, 5), (360, 6)),
        *((393, 7), (619, 2), (800, 6)),
    ),
)
TINY = Copilot(96, ((0, 100), (1, 120)), ((4, 3), (9, 3)))

#: Mean latency over that of Parrot's kernel as printed in the paper, by slots: of one paged
#: kernel with the prompt held once, and of no sharing at all (it ran out of memory from 32 on).
PRINTED_PAGED: Mapping[int, float] = MappingProxyType({8: 1.1, 16: 1.3, 32: 1.4, 64: 1.7})
PRINTED_ALONE: Mapping[int, float] = MappingProxyType({8: 1.8, 16: 2.4})


def copilot_prompts(source: PromptSource, sizes: Sizes, name: str, *, alone: bool) -> Prompts:
    """The requests, in the order in which slots take them."""
    kind = TINY if sizes.is_quick else RECORDED
    outputs = [tokens for tokens, count in kind.outputs for _ in range(count)]
    shares, lengths = zip(*kind.lengths, strict=True)
    places = (np.arange(len(outputs)) + 0.5) / len(outputs)
    own = np.interp(places, shares, lengths).astype(int) - kind.system
    return source.behind(name, kind.system, own.tolist(), outputs, alone=alone)


def run_slots(llm: LLM, prompts: Prompts, slots: int) -> list[float]:
    """Seconds of each request from when its slot takes it to its last token.

    Raises:
        BenchError: it took far too long, or tokens are missing.
    """
    waiting = enumerate(zip(prompts.token_ids, prompts.max_tokens, strict=True))
    running: dict[int, tuple[float, Request]] = {}
    latencies = [0.0] * len(prompts.token_ids)
    deadline = time.perf_counter() + _TIMEOUT_S

    def take(free: int) -> Iterator[tuple[int, tuple[float, Request]]]:
        for number, (ids, tokens) in islice(waiting, free):
            request = llm.submit(ids, greedy(tokens), detokenize=False)
            yield number, (time.perf_counter(), request)

    try:
        running.update(take(slots))
        while running:
            llm.step()
            now = time.perf_counter()
            if now > deadline:
                raise BenchError(f"requests were not done after {_TIMEOUT_S:g} s")
            ended = [number for number, (_, request) in running.items() if request.finished]
            for number in ended:
                begin, request = running.pop(number)
                latencies[number] = now - begin
                if len(request.output().outputs[0].token_ids) != prompts.max_tokens[number]:
                    raise BenchError("tokens are missing")
            running.update(take(len(ended)))
    finally:
        for _, request in running.values():
            request.cancel()
    return latencies


def needed_tokens(prompts: Prompts, slots: int, *, alone: bool) -> int:
    """Tokens of KV that the largest requests of all slots need at once."""
    shared = 0 if alone else prompts.segments[0].length
    lengths = zip(prompts.token_ids, prompts.max_tokens, strict=True)
    own = sorted((len(ids) + tokens - shared for ids, tokens in lengths), reverse=True)
    return shared + sum(own[:slots])


def mean_ms(latencies: Sequence[float]) -> float:
    """Milliseconds a request."""
    return 1000 * sum(latencies) / len(latencies)
