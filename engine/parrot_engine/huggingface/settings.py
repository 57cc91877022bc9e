"""Settings of the huggingface engine. Plain values, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from parrot_engine.exceptions import SettingsError


@dataclass(frozen=True, slots=True)
class HuggingFaceSettings:
    device: str = "auto"
    dtype: str = "auto"
    #: Longest context; None: what the model's configuration says.
    max_context_tokens: int | None = None
    #: Contexts that advance in one step.
    max_batch_size: int = 8
    #: Tokens of one forward pass while a prompt is filled.
    max_batch_tokens: int = 512
    #: Contexts that keep their past key values.
    max_cached_contexts: int = 64
    #: Contexts at most; further ones fail as `overloaded`.
    max_contexts: int = 4096
    #: CPU threads.
    num_threads: int = 1
    #: Run Python code that comes with the checkpoint.
    trust_remote_code: bool = False
    #: Seeds generations that give no seed of their own; None: from the system.
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises `SettingsError` for a number below one."""
        for name in ("max_batch_size", "max_batch_tokens", "max_cached_contexts", "max_contexts",
                     "num_threads", "max_context_tokens"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(name, f"must be at least 1, not {value}")
