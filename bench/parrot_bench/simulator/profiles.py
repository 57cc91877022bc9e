"""Engines to simulate: what they hold and how fast they are, and where each number is from.

A step takes the time of its products (reading the weights and the arithmetic of the tokens it
fills, one beside the other or not), of reading keys and values, something for each sequence that
decodes, and a constant. The arithmetic of attention in prefill, which grows with the context, is
not in it: prompts far above 10,000 tokens are filled slower in reality. The scheduler knows the
terms of its own `StepModel`, and not what a prefix saves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from parrot_scheduler.task import DEFAULT_STEP_MODEL, EngineDescription, EngineId, StepModel

#: What it costs to read a key that another sequence reads in the same step, as part of reading it
#: first. Where every sequence reads its own keys, the L2 cache serves those that read the same ones
#: at the same time; where attention reads a shared prefix once, products and merging remain. Both
#: from 64 sequences behind 6,144 common tokens on one H200: steps of 12.5 and 6.3 ms, beside 6.1 ms
#: for 64 contexts of 576. The same figures are taken for the A100 and the A6000, where nothing of
#: the kind was measured; they give the times of the paper's figure 14 within some 10 %.
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
    #: Tokens of KV that fit into host memory, and seconds to bring one back.
    host_tokens: int = 0
    reload_token_s: float = 0.0
    #: Off: every prompt is filled whole, and nothing is shared.
    prefix_caching: bool = True
    #: Off: prompts are filled before anything is decoded, each whole, as vLLM did in 2024.
    chunked_prefill: bool = True
    #: DecodeBatch read a prefix that they share once per step.
    shared_attention: bool = False
    #: What a further reading of a key costs in the same step, where they do not.
    repeated_read: float = REPEATED_READ
    #: Tokens of prompts in a step in which something more urgent decodes, as the builtin engine's
    #: `max_background_tokens`; None: as many as fit.
    max_background_tokens: int | None = None
    #: As many at most where earlier steps left some; None: no more.
    background_burst_tokens: int | None = None
    #: Tokens (prompts and outputs allowed) of all running sequences; None: what memory holds.
    token_cap: int | None = None
    model: str = "model"
    #: What it says of its steps; None: the truth.
    described: StepModel | None = None
    #: Whether it reports that nothing runs, whatever does.
    claims_idle: bool = False
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

    def slowed(self, times: float) -> EngineProfile:
        """The same engine, whose steps take so many times as long."""
        model = self.step_model
        return replace(
            self,
            step_model=StepModel(
                weights_s=times * model.weights_s,
                context_token_s=times * model.context_token_s,
                prefill_token_s=times * model.prefill_token_s,
                overhead_s=times * model.overhead_s,
                sequence_s=times * model.sequence_s,
            ),
        )

    def description(self, engine_id: EngineId) -> EngineDescription:
        return EngineDescription(
            id=engine_id,
            model=self.model,
            capacity_tokens=self.capacity_tokens,
            max_batch=self.max_batch,
            max_batch_tokens=self.max_batch_tokens,
            block_tokens=self.block_tokens if self.prefix_caching else 0,
            host_tokens=self.host_tokens,
            reports_blocks=self.prefix_caching,
            step_model=self.described or self.step_model,
        )


def _of_2024(
    name: str,
    *,
    weights: float,
    kv_bytes: int,
    bandwidth: float,
    flops: float,
    overhead_s: float,
    **more: Any,
) -> EngineProfile:
    """An engine of the paper, in 16 bits, from what its device reaches (bytes/s, FLOP/s)."""
    step_model = StepModel(
        weights_s=2 * weights / bandwidth,
        context_token_s=kv_bytes / bandwidth,
        prefill_token_s=2 * weights / flops,
        overhead_s=overhead_s,
    )
    return EngineProfile(name=name, step_model=step_model, **more)


#: Parameters, and bytes of keys and values of a token: 40 layers x 5,120 x 2 x 2 bytes of the 13B
#: model, 32 layers x 4,096 x 2 x 2 of the 7B model.
_LLAMA_13B: dict[str, Any] = {"weights": 13.0e9, "kv_bytes": 819_200}
_LLAMA_7B: dict[str, Any] = {"weights": 6.74e9, "kv_bytes": 524_288}
#: What an A100 reaches, and the CPU's part of a step.
_A100: dict[str, Any] = {"bandwidth": 1.5e12, "flops": 170e12, "overhead_s": 4e-3}

#: By the name that `--profile` takes.
PROFILES: dict[str, EngineProfile] = {
    profile.name: profile
    for profile in (
        _of_2024(
            "A100-13B-2024",
            **_LLAMA_13B,
            **_A100,
            capacity_tokens=4000 * 16,
            max_batch_tokens=8000,
            source="Engine: the Parrot paper's setup (4,000 blocks of 16 tokens, batch 256, 8,000 "
            "batched tokens). Step: estimated from the data sheet (A100-80GB: 2.0 TB/s and "
            "312 TFLOP/s, of which 75 % and 55 %) and 4 ms of CPU work per step, chosen so that "
            "a lone decode takes 21.3 ms as in the paper's figure 11 (34.6 s more for 25 more "
            "tokens in each of 65 calls; see figures.py for the 65).",
        ),
        _of_2024(
            "A100-7B-2024",
            **_LLAMA_7B,
            **_A100,
            capacity_tokens=6800 * 16,
            source="Engine: the Parrot paper's setup for its figures 14 and 15 (6,800 blocks of 16 "
            "tokens). Step: as A100-13B-2024.",
        ),
        _of_2024(
            "A6000-7B-2024",
            **_LLAMA_7B,
            bandwidth=0.6e12,
            flops=85e12,
            overhead_s=7e-3,
            capacity_tokens=3000 * 16,
            max_batch_tokens=8000,
            source="Engine: the Parrot paper's setup (3,000 blocks of 16 tokens, batch 256, 8,000 "
            "batched tokens). Step: estimated from the data sheet (RTX A6000: 0.77 TB/s and "
            "155 TFLOP/s, of which 78 % and 55 %) and 7 ms of CPU work per step; a lone decode "
            "takes 29.5 ms, the paper's figure 16 begins at 32.",
        ),
        EngineProfile(
            name="H200-8B",
            step_model=DEFAULT_STEP_MODEL,
            hidden=0.0,
            # (139 GiB x 0.9 - 16 GB of weights) / 131,072 bytes per token, rounded down.
            capacity_tokens=900_000,
            # As fast here as any; smaller ones make long prompts slow to simulate.
            block_tokens=64,
            reload_token_s=131_072 / 50e9,
            source="Step: `parrot-gateway bench engine` on one H200, shape of Llama-3.1-8B: 4.26, "
            "4.50, 6.11 and 13.0 ms at batch 1, 8, 64 and 256 (contexts of 576), 37,201 tokens of "
            "prompts of 8,192 filled a second; these and what was not fitted (512 mixed requests: "
            "8,471 tokens a second) within 5 %. Prompts beside 1 to 64 decodes: 127 tokens 7.4 to "
            "9.5 ms, 255 tokens 10 to 13 ms, as long as one after the other, within 15 %. KV: "
            "arithmetic. Host: PCIe 5.0 at 50 GB/s, "
            "estimated.",
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
PROFILES["H200-8B-long"] = PROFILES["H200-8B"].with_(
    name="H200-8B-long",
    step_model=replace(DEFAULT_STEP_MODEL, prefill_token_s=4.9e-5),
    source="H200-8B for prompts of some 60,000 tokens: seconds a filled token lie on the line "
    "between prompts of 8,192 (26.8 us, measured) and one of 100,000 (66 us: first token after "
    "6.6 s).",
)


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
