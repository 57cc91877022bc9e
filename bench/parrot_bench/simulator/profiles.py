"""Engines to simulate: their memory, their speed, and where each number is from.

A step takes the time of its products (reading the weights and the arithmetic of the tokens it
fills, one beside the other or not), of reading keys and values, something for each sequence that
decodes, and a constant. The arithmetic of attention in prefill, which grows with the context, is
not in it: prompts far above 10,000 tokens are filled slower in reality. The scheduler knows the
terms of its own `StepModel`, and not what a prefix saves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parrot_scheduler.task import DEFAULT_STEP_MODEL, EngineDescription, EngineId, StepModel

#: The model of all engines and tasks.
MODEL = "model"
#: The cost of reading a key that another sequence reads in the same step, as part of reading it
#: first. Where every sequence reads its own keys, the L2 cache serves those that read the same ones
#: at the same time; where attention reads a shared prefix once, products and merging remain. Both
#: from 64 sequences behind 6,144 common tokens on one H200: steps of 12.5 and 6.3 ms, beside 6.1 ms
#: for 64 contexts of 576.
REPEATED_READ = 0.54
SHARED_READ = 0.05


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One kind of simulated engine."""

    name: str
    #: As the scheduler knows it.
    step_model: StepModel
    #: Tokens of KV that fit.
    capacity_tokens: int
    #: Share of the shorter of the two, reading weights and filling prompts, that goes on beside the
    #: other in the same step.
    hidden: float = 1.0
    max_batch: int = 256
    max_batch_tokens: int = 8192
    block_tokens: int = 16
    #: Decodes read a prefix that they share once per step.
    shared_attention: bool = False
    #: The cost of a further reading of a key in the same step, where they do not.
    repeated_read: float = REPEATED_READ
    #: Tokens of prompts in a step in which something more urgent decodes, as the builtin engine's
    #: `max_background_tokens`; None: as many as fit.
    max_background_tokens: int | None = None
    #: As many at most where earlier steps left some; None: no more.
    background_burst_tokens: int | None = None
    #: Where the numbers are from.
    source: str = ""

    def with_(self, **changes: object) -> EngineProfile:
        """The same engine but for some fields."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def step_s(
        self,
        *,
        prefill_tokens: int = 0,
        sequences: int = 0,
        context_tokens: int = 0,
        repeated_tokens: int = 0,
    ) -> float:
        """Seconds of one step.

        Args:
            prefill_tokens: filled in it.
            sequences: that decode in it.
            context_tokens: keys of theirs, each of a prefix that some share counted once.
            repeated_tokens: and for each of those, one less than how many share it.
        """
        model = self.step_model
        repeated = SHARED_READ if self.shared_attention else self.repeated_read
        fill_s = prefill_tokens * model.prefill_token_s
        return (
            fill_s
            + model.weights_s
            - self.hidden * min(fill_s, model.weights_s)
            + (context_tokens + repeated * repeated_tokens) * model.context_token_s
            + sequences * model.sequence_s
            + model.overhead_s
        )

    def description(self, engine_id: EngineId) -> EngineDescription:
        return EngineDescription(
            id=engine_id,
            model=MODEL,
            capacity_tokens=self.capacity_tokens,
            max_batch=self.max_batch,
            max_batch_tokens=self.max_batch_tokens,
            block_tokens=self.block_tokens,
            reports_blocks=True,
            step_model=self.step_model,
        )


#: By the name that `--profile` takes.
PROFILES: dict[str, EngineProfile] = {
    profile.name: profile
    for profile in (
        EngineProfile(
            name="H200-8B",
            step_model=DEFAULT_STEP_MODEL,
            hidden=0.0,
            # (139 GiB x 0.9 - 16 GB of weights) / 131,072 bytes per token, rounded down.
            capacity_tokens=900_000,
            # As fast here as any; smaller ones make long prompts slow to simulate.
            block_tokens=64,
            source="Step: `parrot-gateway bench engine` on one H200, shape of Llama-3.1-8B: 4.26, "
            "4.50, 6.11 and 13.0 ms at batch 1, 8, 64 and 256 (contexts of 576), 37,201 tokens of "
            "prompts of 8,192 filled a second; these and what was not fitted (512 mixed requests: "
            "8,471 tokens a second) within 5 %. Prompts beside 1 to 64 decodes: 127 tokens 7.4 to "
            "9.5 ms, 255 tokens 10 to 13 ms, as long as one after the other, within 15 %. KV: "
            "arithmetic.",
        ),
        EngineProfile(
            name="cpu-demo",
            # The products of a few tokens are no longer hidden behind reading the weights.
            step_model=StepModel(
                weights_s=1.8e-4,
                context_token_s=1.7e-6,
                prefill_token_s=1.8e-4,
                overhead_s=4.8e-3,
                sequence_s=3.6e-4,
            ),
            capacity_tokens=32_768,
            max_batch=64,
            max_batch_tokens=512,
            max_background_tokens=128,
            repeated_read=0.85,
            source="Engine: the defaults of a CPU. Step: processor time of one engine process of "
            "the demo model (4.7 million parameters, float32, one thread) behind a gateway, per "
            "step by its own counter, the smaller of two runs on 2 shared x86-64 cores: 5.4, 7.7, "
            "14.6 and 20.9 ms with 1, 4, 16 and 32 sequences of some 110 tokens, 6.9 and 20.3 ms "
            "with 1 and 8 of 585, 25.7 ms with 4 of 1,560 (these three with what it took to fill "
            "their prompts), 97 ms a step that fills 503 tokens. Fitted within 4 %, but for 32 "
            "sequences, where it says 14 % too much. What a second reading of a key costs: 8 and "
            "16 sequences behind 1,024 and 512 common tokens, one run each. Several engines on "
            "fewer cores take turns, which is not in it.",
        ),
    )
}


def _of_h200(name: str, step: StepModel, capacity_tokens: int, source: str) -> EngineProfile:
    """An engine like H200-8B but for its steps and its memory."""
    return PROFILES["H200-8B"].with_(
        name=name,
        step_model=step,
        capacity_tokens=capacity_tokens,
        source=f"Step: {source} Prompts beside decodes and shared prefixes: as of H200-8B. KV: "
        "arithmetic.",
    )


PROFILES |= {
    profile.name: profile
    for profile in (
        _of_h200(
            "H200-8B-FP8",
            StepModel(
                weights_s=2.4e-3,
                context_token_s=3.25e-8,
                prefill_token_s=1.784e-5,
                overhead_s=0.5e-3,
                sequence_s=11.7e-6,
            ),
            950_000,
            "`bench engine` with weights in FP8 (engine-log, 44): 2.66, 3.37, 5.13 and "
            "10.7 ms at batch 1, 8, 64 and 256, 54,962 tokens of prompts a second; within 11 %.",
        ),
        _of_h200(
            "H200-8B-INT4",
            StepModel(
                weights_s=2.1e-3,
                context_token_s=3.25e-8,
                prefill_token_s=2.369e-5,
                overhead_s=0.5e-3,
                sequence_s=42.6e-6,
            ),
            975_000,
            "`bench engine` with weights in 4 bits (W4A16; engine-log, 44): 2.18, 3.75, "
            "6.68 and 18.3 ms, 41,654 tokens a second; within 23 % at batch 1 and 8, 3 % beyond.",
        ),
        _of_h200(
            "H200x2-8B",
            StepModel(
                weights_s=2.25e-3,
                context_token_s=1.63e-8,
                prefill_token_s=1.506e-5,
                overhead_s=0.5e-3,
                sequence_s=10e-6,
            ),
            1_900_000,
            "`bench engine` on two GPUs (bench/results/engine.md): 2.67, 3.01, 3.82 and 7.71 "
            "ms, 64,938 tokens a second; within 6 %.",
        ),
    )
}

#: The modern baseline, and what this project's own engine does beyond it.
DEFAULT_PROFILE = "H200-8B"
