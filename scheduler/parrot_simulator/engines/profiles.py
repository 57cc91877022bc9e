"""Engines to simulate: what they hold and how fast they are, and where each number is from.

The step model has four terms (`parrot_scheduler.task.StepModel`). It knows nothing of the
arithmetic of attention in prefill, which grows with the context: prompts far above 10,000 tokens
are filled slower in reality.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parrot_scheduler.task import DEFAULT_STEP_MODEL, EngineDescription, EngineId, StepModel


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One kind of simulated engine."""

    name: str
    step_model: StepModel
    #: Tokens of KV that fit.
    capacity_tokens: int
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
    #: Decodes read a prefix that they share once per step.
    shared_attention: bool = False
    #: Tokens of prompts in a step in which something more urgent decodes, as the builtin engine's
    #: `max_background_tokens`; None: as many as fit.
    max_background_tokens: int | None = None
    #: Tokens (prompts and outputs allowed) of all running sequences; None: what memory holds.
    token_cap: int | None = None
    model: str = "model"
    #: Where the numbers are from.
    source: str = ""

    def with_(self, **changes: object) -> EngineProfile:
        """The same engine but for some fields."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def description(self, engine_id: EngineId) -> EngineDescription:
        """What such an engine tells the scheduler of itself."""
        return EngineDescription(
            id=engine_id,
            model=self.model,
            capacity_tokens=self.capacity_tokens,
            max_batch=self.max_batch,
            max_batch_tokens=self.max_batch_tokens,
            block_tokens=self.block_tokens if self.prefix_caching else 0,
            host_tokens=self.host_tokens,
            reports_blocks=self.prefix_caching,
            step_model=self.step_model,
        )


def roofline(
    *,
    parameters: float,
    kv_bytes_per_token: float,
    bandwidth: float,
    flops: float,
    overhead_s: float,
) -> StepModel:
    """A step model of 16-bit weights from what a device reaches (bytes/s, FLOP/s)."""
    return StepModel(
        weights_s=2 * parameters / bandwidth,
        context_token_s=kv_bytes_per_token / bandwidth,
        prefill_token_s=2 * parameters / flops,
        overhead_s=overhead_s,
    )


#: By the name that `--profile` takes.
PROFILES: dict[str, EngineProfile] = {
    profile.name: profile
    for profile in (
        EngineProfile(
            name="A100-13B-2024",
            # 13.0e9 weights; keys and values of 40 layers x 5,120 x 2 x 2 bytes.
            step_model=roofline(
                parameters=13.0e9,
                kv_bytes_per_token=819_200,
                bandwidth=1.5e12,
                flops=170e12,
                overhead_s=4e-3,
            ),
            capacity_tokens=4000 * 16,
            max_batch_tokens=8000,
            source="Engine: the Parrot paper's setup (4,000 blocks of 16 tokens, batch 256, 8,000 "
            "batched tokens). Step: estimated from the data sheet (A100-80GB: 2.0 TB/s and "
            "312 TFLOP/s, of which 75 % and 55 %) and 4 ms of CPU work per step, chosen so that "
            "a lone decode takes 21.3 ms as in the paper's figure 11 (34.6 s more for 25 more "
            "tokens in each of 65 calls; see simulator/workloads/documents.py for the 65).",
        ),
        EngineProfile(
            name="A100-7B-2024",
            # 6.74e9 weights; keys and values of 32 layers x 4,096 x 2 x 2 bytes.
            step_model=roofline(
                parameters=6.74e9,
                kv_bytes_per_token=524_288,
                bandwidth=1.5e12,
                flops=170e12,
                overhead_s=4e-3,
            ),
            capacity_tokens=6800 * 16,
            max_batch_tokens=8192,
            source="Engine: the Parrot paper's setup for its figures 14 and 15 (6,800 blocks of 16 "
            "tokens). Step: as A100-13B-2024.",
        ),
        EngineProfile(
            name="A6000-7B-2024",
            # 6.74e9 weights; keys and values of 32 layers x 4,096 x 2 x 2 bytes.
            step_model=roofline(
                parameters=6.74e9,
                kv_bytes_per_token=524_288,
                bandwidth=0.6e12,
                flops=85e12,
                overhead_s=7e-3,
            ),
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
            # (139 GiB x 0.9 - 16 GB of weights) / 131,072 bytes per token, rounded down.
            capacity_tokens=900_000,
            # As fast here as any; smaller ones make long prompts slow to simulate.
            block_tokens=64,
            reload_token_s=131_072 / 50e9,
            source="Step: docs/engine-performance.md (batch 1: 4.9 ms, 64 x 576: 6.5 ms, 8,192 "
            "tokens filled in 199 ms). KV: arithmetic. Host: PCIe 5.0 at 50 GB/s, estimated.",
        ),
    )
}
PROFILES["H200-8B-long"] = PROFILES["H200-8B"].with_(
    name="H200-8B-long",
    step_model=replace(DEFAULT_STEP_MODEL, prefill_token_s=2 * DEFAULT_STEP_MODEL.prefill_token_s),
    source="H200-8B for prompts of some 60,000 tokens. Attention costs 4 x 4,096 x 32 operations a "
    "token for each token before it, 16e9 on average there: as many as all weights (2 x 8e9). So "
    "filling a token takes twice as long. An estimate, not measured.",
)

#: The modern baseline, and what this project's own engine does beyond it.
DEFAULT_PROFILE = "H200-8B"
