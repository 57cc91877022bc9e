"""Settings of both engines, and how large the builtin engine's KV cache becomes.

Plain values without torch. The loader checks names of devices and dtypes against the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from parrot_engine.exceptions import SettingsError

#: By default the cache holds this many contexts of full length …
DEFAULT_CACHED_CONTEXTS = 16
#: … but takes at most this share of the memory that is free once the weights are loaded.
DEFAULT_MEMORY_SHARE = 0.4

#: What is another default on a GPU: blocks that its copy engine fetches whole, steps large enough
#: to keep it busy, and beside something more urgent so many tokens of prompts that these do not
#: starve (half of the engine's time in the long run, engine-log 45), at once so few that a
#: step with 256 generations is one of those that have a graph.
CUDA_DEFAULTS = MappingProxyType(
    {
        "block_size": 64,
        "max_batch_size": 256,
        "max_batch_tokens": 8192,
        "max_background_tokens": 255,
        "background_burst_tokens": 765,
        "long_prompt_tokens": 32_768,
        "speculative_batch_tokens": 256,
    }
)


#: By setting, the values that it may have.
_CHOICES = MappingProxyType(
    {
        "kv_cache_dtype": ("auto", "fp8_e4m3"),
        "overlap": ("auto", "on", "off"),
        "cuda_graphs": ("auto", "start", "lazy", "off"),
    }
)

#: Draft tokens at a time: with the token before them a row that attention still reads as a decode,
#: its keys split among many programs.
MAX_SPECULATIVE_TOKENS = 7
#: LoRA adapters of one step where some are loaded at the start and no number is given, the rank
#: for which there is room where none is asked for, and the largest number and rank.
DEFAULT_MAX_LORAS = 8
DEFAULT_LORA_RANK = 16
MAX_LORAS = 1024
MAX_LORA_RANK = 256


@dataclass(frozen=True, slots=True)
class BuiltinSettings:
    """Settings of the builtin engine; every default is here and nowhere else.

    Raises:
        SettingsError: a value is out of its range.
    """

    #: Tokens per KV block.
    block_size: int = 16
    #: Blocks of the KV cache; None: from `kv_cache_bytes`, else sized by `kv_blocks`.
    num_blocks: int | None = None
    #: Memory for the KV cache, all layers together; None: sized by `kv_blocks`, on a GPU from
    #: `gpu_memory_utilization`.
    kv_cache_bytes: int | None = None
    #: How keys and values are stored: `auto`, in the model's dtype; `fp8_e4m3`, in a byte each,
    #: with a scale for each head of each token: half the memory of 16 bits, and rounded.
    kv_cache_dtype: str = "auto"
    #: Share of a GPU's memory that may be used: for weights, the largest step, graphs, and what
    #: then remains for the KV cache.
    gpu_memory_utilization: float = 0.9
    #: In its place the share of the device's memory, on a CPU of the host's, that this engine may
    #: use, whatever others on the device do; None: no such share.
    memory_share: float | None = None
    #: Contexts that compute in the same step.
    max_batch_size: int = 64
    #: Tokens computed per step, decodes and chunks of prefill together.
    max_batch_tokens: int = 512
    #: Tokens of prompts in a step in which something more urgent (a smaller priority number) gets
    #: a token; None: a quarter of `max_batch_tokens`, on a GPU 255. More fills prompts sooner,
    #: less gives the urgent shorter steps.
    max_background_tokens: int | None = None
    #: The same at most, in steps behind others that left some of `max_background_tokens`: what they
    #: left is saved up, 64 times this at most. None: no more than `max_background_tokens`, on a GPU
    #: 765.
    background_burst_tokens: int | None = None
    #: Prompts of more new tokens than this are limited in the same way behind generations of the
    #: same priority; None: none are.
    long_prompt_tokens: int | None = None
    #: Longest context; None: what the model allows (and the cache holds).
    max_context_tokens: int | None = None
    #: Rows of logits per step for `prompt_logprobs`, which need one per token.
    max_logprob_tokens: int = 512
    #: Contexts that have work but do not run yet; more are refused as `overloaded`.
    max_waiting: int = 1024
    #: Contexts that exist at once, idle ones included; more are refused as `overloaded`.
    max_contexts: int = 65_536
    #: Find the blocks of earlier contexts again by their tokens.
    prefix_caching: bool = True
    #: `cpu`, `cuda`, `cuda:1`, …; `auto` takes a GPU where there is one.
    device: str = "auto"
    #: `float32`, `bfloat16`, …; `auto` chooses by device and checkpoint.
    dtype: str = "auto"
    #: `torch`, `triton`; `auto` takes Triton's kernels on a GPU that is new enough for them.
    kernels: str = "auto"
    #: Seeds generations that give no seed of their own; None: from the system.
    seed: int | None = None
    #: Draw the weights at random, from `seed` or from 0, instead of reading them: for measuring.
    dummy_weights: bool = False
    #: Plan and launch the next step while the device computes this one: `on`, `off`; `auto` does
    #: so on a GPU. Outputs are the same.
    overlap: str = "auto"
    #: Launch steps as CUDA graphs: `auto` captures each one when it is first needed or while the
    #: engine is idle, `start` all before the engine is ready (as `auto` does over several GPUs),
    #: `lazy` only when needed, `off` none. Without effect on a CPU.
    cuda_graphs: str = "auto"
    #: Tokens of a generation that are drafted at a time, from what stood in its text before; 0
    #: draft tokens none. Outputs are the same.
    speculative_tokens: int = 0
    #: Tokens that have to agree for a draft token, and how many are compared at most.
    speculative_min_ngram: int = 3
    speculative_max_ngram: int = 8
    #: Rows and draft tokens of a step together, up to which draft tokens are made.
    speculative_batch_tokens: int = 64
    #: GPUs of this host that hold the model together, `device` and those behind it.
    tensor_parallel: int = 1
    #: Of mixtures of experts each of those GPUs holds whole experts, not a part of every expert.
    enable_expert_parallel: bool = False
    #: Let those GPUs read each other's memory for the sums of small steps; else NCCL's messages.
    peer_memory: bool = True
    #: Memory of the host, in GB of 10^9 bytes, for blocks that leave the device; 0: none.
    host_memory_gb: float = 0.0
    #: The same in blocks; wins over `host_memory_gb`.
    host_blocks: int | None = None
    #: Fewest tokens that are brought back from there rather than computed; None: measured.
    host_min_tokens: int | None = None
    #: LoRA adapters of one step, for which there is room beside the weights; 0: none are served.
    max_loras: int = 0
    #: Their largest rank.
    max_lora_rank: int = DEFAULT_LORA_RANK
    #: A generation's tokens do not depend on the texts beside it, on what is cached, or on where
    #: it is continued, at the price of slower steps.
    deterministic: bool = False
    #: CPU threads of the runner.
    num_threads: int = 1

    def __post_init__(self) -> None:
        _check_positive(
            self, "block_size", "max_batch_size", "max_batch_tokens", "max_logprob_tokens",
            "max_waiting", "max_contexts", "speculative_min_ngram", "speculative_batch_tokens",
            "tensor_parallel", "num_threads", "num_blocks", "kv_cache_bytes", "max_context_tokens",
            "max_background_tokens", "background_burst_tokens", "long_prompt_tokens",
            "host_min_tokens",
        )  # fmt: skip
        if not 0 <= self.speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise SettingsError(
                "speculative_tokens",
                f"must be from 0 to {MAX_SPECULATIVE_TOKENS}, not {self.speculative_tokens}",
            )
        if self.speculative_max_ngram < self.speculative_min_ngram:
            raise SettingsError(
                "speculative_max_ngram",
                f"must be at least speculative_min_ngram, {self.speculative_min_ngram}, not "
                f"{self.speculative_max_ngram}",
            )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise SettingsError(
                    name, f"must be one of {', '.join(allowed)}, not {getattr(self, name)!r}"
                )
        for name in ("gpu_memory_utilization", "memory_share"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise SettingsError(name, f"must be above 0 and at most 1, not {value}")
        self._check_host_tier()
        if self.deterministic and (self.tensor_parallel > 1 or self.max_loras):
            raise SettingsError("deterministic", "not with tensor_parallel or adapters")
        if not 0 <= self.max_loras <= MAX_LORAS:
            raise SettingsError("max_loras", f"must be from 0 to {MAX_LORAS}, not {self.max_loras}")
        if not 1 <= self.max_lora_rank <= MAX_LORA_RANK:
            raise SettingsError(
                "max_lora_rank", f"must be from 1 to {MAX_LORA_RANK}, not {self.max_lora_rank}"
            )

    def _check_host_tier(self) -> None:
        for name in ("host_memory_gb", "host_blocks"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise SettingsError(name, f"must be 0 or more, not {value}")
        if not self.has_host_tier:
            return
        name = "host_memory_gb" if self.host_blocks is None else "host_blocks"
        if not self.prefix_caching:
            raise SettingsError(name, "blocks are found again by prefix_caching, which is off")
        if self.tensor_parallel > 1:
            raise SettingsError(name, "there is no host tier with tensor_parallel yet")

    @property
    def has_host_tier(self) -> bool:
        """Return True if blocks that leave the device go to the host's memory."""
        return self.host_memory_gb > 0 if self.host_blocks is None else self.host_blocks > 0

    def host_slots(self, bytes_per_block: int) -> int:
        """Return the number of blocks of `bytes_per_block`, over all layers, that go there.

        Raises:
            SettingsError: there is a host tier, and not one fits into it.
        """
        if self.host_blocks is not None:
            return self.host_blocks
        slots = int(self.host_memory_gb * 1e9) // bytes_per_block
        if self.has_host_tier and slots < 1:
            raise SettingsError(
                "host_memory_gb", f"one block takes {bytes_per_block} bytes; give more"
            )
        return slots

    @property
    def host_reserve(self) -> int:
        """Blocks of the device that have copies before they are needed: those of two steps."""
        return 2 * -(-self.max_batch_tokens // self.block_size) + self.max_batch_size

    @property
    def background_tokens(self) -> int:
        return self.max_background_tokens or max(1, self.max_batch_tokens // 4)

    @property
    def background_burst(self) -> int:
        return max(self.background_tokens, self.background_burst_tokens or 0)

    @classmethod
    def for_device(cls, device_type: str, **given: Any) -> Self:
        """Settings with the defaults of a kind of device, `cpu` or `cuda`.

        Raises:
            SettingsError: a value is out of its range.
        """
        defaults = CUDA_DEFAULTS if device_type == "cuda" else {}
        return cls(**{**defaults, **given})


@dataclass(frozen=True, slots=True)
class HuggingFaceSettings(BuiltinSettings):
    """Settings of the huggingface engine: those of the builtin engine, and a few more.

    Several GPUs and dummy weights are the builtin engine's alone.

    Raises:
        SettingsError: a value is out of its range.
    """

    #: Contexts at most; further ones fail as `overloaded`.
    max_contexts: int = 4096
    #: All of them may wait.
    max_waiting: int = 4096
    #: Run Python code that comes with the checkpoint.
    trust_remote_code: bool = False


def _check_positive(settings: BuiltinSettings, *names: str) -> None:
    """Refuse numbers below one; None, where it is allowed, is none."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise SettingsError(name, f"must be at least 1, not {value}")


def kv_blocks(
    settings: BuiltinSettings,
    *,
    bytes_per_block: int,
    max_position: int,
    free_bytes: int,
    memory_share: float = DEFAULT_MEMORY_SHARE,
) -> int:
    """Number of blocks that the KV cache gets.

    Args:
        settings: `num_blocks` wins over `kv_cache_bytes`; with neither, room for
            `DEFAULT_CACHED_CONTEXTS` contexts of full length within a share of the free memory.
        bytes_per_block: of all layers, keys and values.
        max_position: longest context that the model allows.
        free_bytes: memory left on the device after loading the weights.
        memory_share: share of `free_bytes` that an unsized cache may take.

    Raises:
        SettingsError: the memory does not hold a single block.
    """
    if settings.num_blocks is not None:
        return settings.num_blocks
    if settings.kv_cache_bytes is not None:
        blocks = settings.kv_cache_bytes // bytes_per_block
        if blocks < 1:
            raise SettingsError(
                "kv_cache_bytes", f"one block takes {bytes_per_block} bytes; give more"
            )
        return blocks
    longest = min(max_position, settings.max_context_tokens or max_position)
    preferred = DEFAULT_CACHED_CONTEXTS * -(-longest // settings.block_size)
    affordable = int(free_bytes * memory_share) // bytes_per_block
    if affordable < 1:
        raise SettingsError(
            "kv_cache_bytes",
            f"{free_bytes} bytes are free, one block takes {bytes_per_block}: free some memory, "
            "or take a smaller model or block_size",
        )
    return min(preferred, affordable)
