"""What `parrot-gateway bench engine` measures: this engine, through its offline API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from parrot_engine.bench.engine_prompts import Prompts
from parrot_engine.llm import LLM
from parrot_engine.protocol import SamplingParams


class Subject(Protocol):
    """An engine with one model loaded."""

    name: str
    #: Ids below this may stand in prompts.
    vocab_size: int
    #: Longest context, and tokens that its KV cache holds, as far as they are known.
    max_context_tokens: int | None
    cache_tokens: int | None

    def generate(self, prompts: Prompts) -> list[int]:
        """Generate greedily, past ends of text; the number of tokens of each prompt."""
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


def greedy(max_tokens: int) -> SamplingParams:
    """How every request of the benchmark is sampled."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


class ParrotSubject:
    """This engine; implements `Subject`."""

    name = "parrot"

    def __init__(self, llm: LLM, *, devices: int = 1) -> None:
        """Take an LLM on so many devices that nobody else uses."""
        self.llm = llm
        self._devices = devices
        info = llm.info
        self.vocab_size = info.vocab_size
        self.max_context_tokens: int | None = info.max_context_tokens
        self.cache_tokens: int | None = info.num_blocks * info.block_size

    def generate(self, prompts: Prompts) -> list[int]:
        """See `Subject`."""
        outputs = self.llm.generate(
            prompts.token_ids, [greedy(tokens) for tokens in prompts.max_tokens], detokenize=False
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """See `Subject`."""
        self.llm.close()

    @property
    def shares(self) -> bool:
        """Whether attention reads what rows share once, and can be told not to."""
        # With several devices each has a process with an attention of its own.
        return self._devices == 1 and bool(getattr(self._attention(), "_share", False))

    @contextmanager
    def without_sharing(self) -> Iterator[None]:
        """Meanwhile every row reads all of its keys for itself, with the same kernels."""
        attention = self._attention()
        attention._share = False
        try:
            yield
        finally:
            attention._share = True

    def _attention(self) -> Any:
        # NOTE: no setting of the engine: there is no other reason to switch it off.
        return getattr(getattr(self.llm._engine, "_runner", None), "_attention", None)
