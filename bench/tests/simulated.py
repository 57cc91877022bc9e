"""One simulated engine on a clock of its own."""

from __future__ import annotations

from collections.abc import Iterable

from parrot_bench.simulator.clock import Clock
from parrot_bench.simulator.engines.engine import SimulatedEngine
from parrot_bench.simulator.engines.prompts import PromptMaker
from parrot_bench.simulator.engines.sequences import EngineSequence
from parrot_bench.simulator.plan import Segment
from parrot_bench.simulator.profiles import EngineProfile
from parrot_scheduler.task import StepModel

BLOCK = 16
#: Powers of two, so that sums of floats are exact.
MODEL = StepModel(
    weights_s=2.0**-8, context_token_s=2.0**-26, prefill_token_s=2.0**-16, overhead_s=2.0**-10
)


def profile(**changes: object) -> EngineProfile:
    base = EngineProfile(
        name="test",
        step_model=MODEL,
        capacity_tokens=16_384,
        max_batch=64,
        max_batch_tokens=2048,
        block_tokens=BLOCK,
    )
    return base.with_(**changes)


class Bench:
    """One engine on a clock of its own."""

    def __init__(self, engine_profile: EngineProfile) -> None:
        self.clock = Clock()
        self.engine = SimulatedEngine("e", engine_profile, self)
        self.maker = PromptMaker(BLOCK)
        self.ended_at: dict[int, float] = {}
        self.order: list[int] = []

    def sequence(
        self, task_id: int, segments: Iterable[tuple[object, int]], output: int, **more: object
    ) -> EngineSequence:
        prompt = self.maker.make("t", [Segment(*s) for s in segments])
        part = self.maker.behind(prompt, Segment(("output", task_id), output))
        key = (more.pop("priority", 0), 0)
        return EngineSequence(task_id, prompt, output, output_part=part, key=key, **more)  # type: ignore[arg-type]

    def submit(
        self,
        at: float,
        task_id: int,
        segments: Iterable[tuple[object, int]],
        output: int,
        **more: object,
    ) -> EngineSequence:
        sequence = self.sequence(task_id, segments, output, **more)
        self.clock.at(at, lambda s, _: self.engine.submit(self.clock.now, s), sequence)
        return sequence

    def run(self, until: float = float("inf")) -> None:
        while (time := self.clock.next_time()) is not None and time <= until:
            self.clock.advance()
            self.engine.check()

    def wake_engine(self, engine: SimulatedEngine, time: float) -> None:
        self.clock.at(time, self._wake)

    def _wake(self, *_: object) -> None:
        self.engine.wake(self.clock.now)

    def filled(self, sequence: EngineSequence) -> None:
        assert sequence.computed <= sequence.target

    def ended(self, sequence: EngineSequence) -> None:
        assert sequence.task_id not in self.ended_at, "a sequence ends once"
        self.ended_at[sequence.task_id] = self.clock.now
        self.order.append(sequence.task_id)

    def stepped(self, engine: SimulatedEngine) -> None:
        assert engine.cache.used_tokens <= engine.profile.capacity_tokens
        assert engine.running <= engine.profile.max_batch


def step(prefill: int, context: int) -> float:
    return profile().step_s(prefill_tokens=prefill, context_tokens=context)
