"""Other engines on the same prompts, where they are installed.

Each runs in a process of its own, after this engine has given its memory back, with random weights
of the same shape. None is asked for text.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parrot_engine.bench.engine_prompts import Prompts
from parrot_engine.bench.engine_results import BenchError
from parrot_engine.bench.engine_subjects import Subject

#: By their names on the command line; each is also the package that must be there.
PEERS = ("transformers", "vllm")

#: Longest wait for one result of transformers.
_RESULT_TIMEOUT_S = 300.0


def is_installed(peer: str) -> bool:
    """Whether a peer can be imported here."""
    return find_spec(peer) is not None


def open_peer(
    name: str, folder: Path, *, device: str, dtype: str, max_batch_size: int, batch_tokens: int
) -> Subject:
    """Load a peer with random weights of the shape in `folder`.

    Args:
        name: one of `PEERS`.
        folder: with `config.json`.
        device: as torch names it.
        dtype: of weights and cache.
        max_batch_size: requests that decode together.
        batch_tokens: tokens of one step.
    """
    if name == "vllm":
        return VllmSubject(folder, dtype, max_batch_size, batch_tokens)
    return TransformersSubject(folder, device, dtype, max_batch_size, batch_tokens)


class TransformersSubject:
    """Continuous batching of transformers 5; implements `Subject`."""

    name = "transformers"

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
        """See `Subject`."""
        self._manager.stop(block=True)


class VllmSubject:
    """vLLM through its offline API; implements `Subject`."""

    name = "vllm"

    def __init__(self, folder: Path, dtype: str, max_batch_size: int, batch_tokens: int) -> None:
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
        )
        config = self._llm.llm_engine.model_config
        self.vocab_size: int = config.get_vocab_size()
        self.max_context_tokens: int | None = config.max_model_len
        self.cache_tokens: int | None = None

    def generate(self, prompts: Prompts) -> list[int]:
        """See `Subject`."""
        params = [
            self._vllm.SamplingParams(
                max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False
            )
            for tokens in prompts.max_tokens
        ]
        given = [{"prompt_token_ids": ids} for ids in prompts.token_ids]
        outputs = self._llm.generate(given, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """See `Subject`: its memory goes with the process."""
