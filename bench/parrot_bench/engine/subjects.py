"""The engines that `parrot-gateway bench engine` measures: this one, and peers that are installed.

Each peer runs in a process of its own, after this engine has given its memory back, with random
weights of the same shape. No engine detokenizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from parrot_engine.llm import LLM
from parrot_engine.protocol import SamplingParams

from parrot_bench.engine.prompts import Prompts
from parrot_bench.engine.report import BenchError

#: By their names on the command line the packages that must be there; `huggingface` is this
#: engine's own over the models of transformers.
PEERS = {"transformers": "transformers", "huggingface": "transformers", "vllm": "vllm"}

#: The share of a device that vLLM takes: the process that starts it holds a context there.
_VLLM_MEMORY = 0.85
#: Longest wait for one result of transformers.
_RESULT_TIMEOUT_S = 300.0


class Subject(Protocol):
    """An engine with one model loaded."""

    name: str
    #: Ids below this may stand in prompts.
    vocab_size: int
    #: Longest context, and tokens that its KV cache holds, as far as they are known.
    max_context_tokens: int | None
    cache_tokens: int | None
    #: Whether it takes a temperature and top-p.
    draws: bool

    def generate(self, prompts: Prompts) -> list[int]:
        """Generate past ends of text; the number of tokens of each prompt."""
        ...

    def close(self) -> None:
        """Give its memory back."""
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

    draws = True

    def __init__(self, llm: LLM, name: str = "parrot") -> None:
        """Take an LLM, which it uses alone."""
        self.llm = llm
        self.name = name
        info = llm.info
        self.vocab_size = info.vocab_size
        self.max_context_tokens: int | None = info.max_context_tokens
        self.cache_tokens: int | None = info.num_blocks * info.block_size

    def generate(self, prompts: Prompts) -> list[int]:
        outputs = self.llm.generate(
            prompts.token_ids, sampling_of(prompts), adapter=prompts.adapters, detokenize=False
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        self.llm.close()

    @property
    def shares(self) -> bool:
        """Whether attention reads shared keys once, and that can be switched off."""
        return self.llm.share_prefixes(True)

    @contextmanager
    def without_sharing(self) -> Iterator[None]:
        """Meanwhile every row reads all of its keys for itself, with the same kernels."""
        self.llm.share_prefixes(False)
        try:
            yield
        finally:
            self.llm.share_prefixes(True)


def is_installed(peer: str) -> bool:
    return find_spec(PEERS[peer]) is not None


def open_peer(
    name: str,
    folder: Path,
    *,
    device: str,
    dtype: str,
    max_batch_size: int,
    batch_tokens: int,
    devices: int = 1,
) -> Subject:
    """Load a peer with random weights of the shape in `folder`.

    Args:
        name: one of `PEERS`.
        folder: with `config.json`.
        device: as torch names it.
        dtype: of weights and cache.
        max_batch_size: requests that decode together.
        batch_tokens: tokens of one step.
        devices: GPUs that the model is spread over.

    Raises:
        BenchError: it cannot be spread.
    """
    if name == "vllm":
        return VllmSubject(folder, dtype, max_batch_size, batch_tokens, devices)
    if devices > 1:
        raise BenchError(f"{name} runs on one device")
    if name == "huggingface":
        return open_huggingface(folder, device, dtype, max_batch_size, batch_tokens)
    return TransformersSubject(folder, device, dtype, max_batch_size, batch_tokens)


def open_huggingface(
    folder: Path, device: str, dtype: str, max_batch_size: int, batch_tokens: int
) -> ParrotSubject:
    """This engine over the class that transformers has for the shape in `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with TemporaryDirectory() as checkpoint:
        config = AutoConfig.from_pretrained(folder)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(checkpoint)
        del model
        llm = LLM(
            checkpoint,
            kind="huggingface",
            skip_tokenizer=True,
            device=device,
            dtype=dtype,
            max_batch_size=max_batch_size,
            max_batch_tokens=batch_tokens,
        )
    return ParrotSubject(llm, "huggingface")


class TransformersSubject:
    """Continuous batching of transformers 5; implements `Subject`."""

    name = "transformers"
    draws = False

    def __init__(
        self, folder: Path, device: str, dtype: str, max_batch_size: int, batch_tokens: int
    ) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        config = AutoConfig.from_pretrained(folder)
        self.vocab_size: int = config.vocab_size
        self.max_context_tokens: int | None = config.max_position_embeddings
        self.cache_tokens: int | None = None
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(
            max_batch_tokens=batch_tokens, max_requests_per_batch=max_batch_size
        )
        self._manager = model.eval().init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        self._manager.start()

    def generate(self, prompts: Prompts) -> list[int]:
        """See `Subject`.

        Raises:
            BenchError: a request failed, or no result came for minutes.
        """
        numbers = {}
        for number, (ids, tokens) in enumerate(
            zip(prompts.token_ids, prompts.max_tokens, strict=True)
        ):
            numbers[self._manager.add_request(ids, max_new_tokens=tokens)] = number
        counts = [0] * len(numbers)
        for _ in range(len(counts)):
            output = self._manager.get_result(timeout=_RESULT_TIMEOUT_S)
            if output is None or output.error is not None:
                raise BenchError(f"transformers: {'no result' if output is None else output.error}")
            counts[numbers[output.request_id]] = len(output.generated_tokens)
        return counts

    def close(self) -> None:
        self._manager.stop(block=True)


class VllmSubject:
    """vLLM through its offline API; implements `Subject`."""

    name = "vllm"
    draws = True

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

    def close(self) -> None:
        """See `Subject`: its memory goes with the process."""
