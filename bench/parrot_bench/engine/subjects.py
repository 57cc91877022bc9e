"""The engines that `parrot-gateway bench engine` measures: this one, and vLLM where installed.

A peer runs in a process of its own, after this engine has given its memory back, with random
weights of the same shape. No engine detokenizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from parrot_engine.llm import LLM
from parrot_engine.protocol import SamplingParams

from parrot_bench.engine.prompts import Prompts

#: Names on the command line, which are those of packages.
PEERS = ("vllm",)
#: The share of a device that vLLM takes: the process that starts it holds a context there.
_VLLM_MEMORY = 0.85


class Subject(Protocol):
    """An engine with one model loaded."""

    name: str
    #: Ids below this may stand in prompts.
    vocab_size: int
    #: Longest context, and tokens that its KV cache holds, as far as they are known.
    max_context_tokens: int | None
    cache_tokens: int | None

    def generate(self, prompts: Prompts) -> list[int]:
        """Generate past ends of text; return the number of tokens of each prompt."""
        ...


def sampling_of(prompts: Prompts) -> list[SamplingParams]:
    """The sampling of each prompt on this engine."""
    return [
        SamplingParams(
            max_tokens=tokens, temperature=prompts.temperature, top_p=prompts.top_p, ignore_eos=True
        )
        for tokens in prompts.max_tokens
    ]


class ParrotSubject:
    """This engine; implements `Subject`."""

    name = "parrot"

    def __init__(self, llm: LLM) -> None:
        """Take an LLM, which it uses alone."""
        self.llm = llm
        info = llm.info
        self.vocab_size = info.vocab_size
        self.max_context_tokens: int | None = info.max_context_tokens
        self.cache_tokens: int | None = info.num_blocks * info.block_size

    def generate(self, prompts: Prompts) -> list[int]:
        outputs = self.llm.generate(prompts.token_ids, sampling_of(prompts), detokenize=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    @property
    def shares(self) -> bool:
        """True where attention reads shared keys once, and that can be switched off."""
        return self.llm.share_prefixes(True)

    @contextmanager
    def without_sharing(self) -> Iterator[None]:
        """Let every row read all of its keys for itself meanwhile, with the same kernels."""
        self.llm.share_prefixes(False)
        try:
            yield
        finally:
            self.llm.share_prefixes(True)


def is_installed(peer: str) -> bool:
    return find_spec(peer) is not None


class VllmSubject:
    """vLLM through its offline API; implements `Subject`."""

    name = "vllm"

    def __init__(
        self, folder: Path, dtype: str, max_batch_size: int, batch_tokens: int, devices: int
    ) -> None:
        # By name: it is in no environment that types are checked in.
        self._vllm: Any = import_module("vllm")
        self._llm = self._vllm.LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=dtype,
            max_num_seqs=max_batch_size,
            max_num_batched_tokens=batch_tokens,
            enable_prefix_caching=True,
            tensor_parallel_size=devices,
            gpu_memory_utilization=_VLLM_MEMORY,
        )
        config = self._llm.llm_engine.model_config
        self.vocab_size: int = config.get_vocab_size()
        self.max_context_tokens: int | None = config.max_model_len
        self.cache_tokens: int | None = None

    def generate(self, prompts: Prompts) -> list[int]:
        params = [
            self._vllm.SamplingParams(
                max_tokens=tokens,
                temperature=prompts.temperature,
                top_p=prompts.top_p,
                ignore_eos=True,
                detokenize=False,
            )
            for tokens in prompts.max_tokens
        ]
        given = [{"prompt_token_ids": ids} for ids in prompts.token_ids]
        outputs = self._llm.generate(given, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]
