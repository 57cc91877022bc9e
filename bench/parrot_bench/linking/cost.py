"""CPU time and memory of a linker that knows many outputs, by the size of the prompt."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import msgspec

from parrot_bench.linking.score import Linker
from parrot_bench.linking.script import CHAT, chat_answer, user
from parrot_bench.linking.text import Text

SIZES_KB = (1, 4, 16, 64, 250, 1000)
#: Prompts of each size: at least, and of 1 kB. Short ones differ more from each other.
ROUNDS = 7
SHORT_ROUNDS = 160
TENANT = "tenant"
#: Between calls; short enough for all outputs to be recent.
PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one linker.

    Args:
        indexed: outputs it knew.
        microseconds: of one request whose prompt is new but for a quoted output, by kB; medians.
        megabytes: memory that the outputs take, by tracemalloc.
    """

    indexed: int
    microseconds: dict[int, float]
    megabytes: float

    @property
    def slope(self) -> float:
        """Microseconds per further kB, from 4 kB to the largest."""
        large = max(self.microseconds)
        return (self.microseconds[large] - self.microseconds[4]) / (large - 4)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "slope": self.slope}


def measure(
    make: Callable[[], Linker], indexed: int = 10_000, sizes_kb: Sequence[int] = SIZES_KB
) -> Cost:
    """Fill a linker with outputs of about 500 characters, then time prompts of all sizes.

    Memory is that of a second one, filled under tracemalloc: tracing takes time.
    """
    text = Text("cost")
    # The words of few texts in another order: drawing 10,000 texts takes longer than linking them.
    pool = [text.sentence() for _ in range(4000)]
    outputs = [" ".join(text.draw.choices(pool, k=5)) + text.identifier() for _ in range(indexed)]
    prompts = [f"{text.draw.choice(pool)} {text.identifier()}" for _ in range(indexed)]
    linker = make()
    _fill(linker, prompts, outputs)
    microseconds = {size: _time(linker, text, size, outputs) for size in sizes_kb}
    del linker
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    linker = make()
    _fill(linker, prompts, outputs)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return Cost(indexed, microseconds, used / 1e6)


def _fill(linker: Linker, prompts: Sequence[str], outputs: Sequence[str]) -> None:
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        now = number * PAUSE_S
        linker.request(TENANT, f"call-{number}", _request(prompt), CHAT, now)
        answer = msgspec.json.encode({"id": f"answer-{number}", **chat_answer(output)})
        linker.answer(TENANT, f"call-{number}", answer, now + PAUSE_S / 2)


def _time(linker: Linker, text: Text, size_kb: int, outputs: Sequence[str]) -> float:
    times = []
    now = len(outputs) * PAUSE_S
    for number in range(max(ROUNDS, SHORT_ROUNDS // size_kb)):
        quoted = text.draw.choice(outputs)
        prompt = f"{text.prose(max(1, size_kb * 1000 - len(quoted)))}\n{quoted}"
        body = _request(prompt)
        began = time.thread_time()
        linker.request(TENANT, f"size-{size_kb}-{number}", body, CHAT, now + number)
        times.append(time.thread_time() - began)
    return 1e6 * median(times)


def _request(prompt: str) -> bytes:
    return msgspec.json.encode({"model": "model", "messages": [user(prompt)]})
