"""Low-rank products on the device against float64, and steps with adapters through real graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine.lora_cases import CASES, LoraCase, error_of
from harness.lora_folders import make_adapter
from parrot_engine import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

CUDA = torch.device("cuda")
BOUNDS = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
#: As of an 8B model: 64 rows over 8 adapters, and a prompt in chunks.
LARGE = {
    "decode": LoraCase(
        4096, (4096, 1024, 1024), 64, tuple((16 << slot % 3,) * 3 for slot in range(8)),
        tuple((row % 9 - 1, 1) for row in range(72)), 132,
    ),
    "prefill": LoraCase(
        2048, (8192, 8192), 256, ((256, 256), (8, 0)), ((0, 1000), (-1, 30), (1, 500)), 132
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_products(case: str, dtype: torch.dtype) -> None:
    for tile_size in (16, 64):
        assert error_of({**CASES, **LARGE}[case], dtype, CUDA, tile_size) < BOUNDS[dtype]


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_answers_are_those_of_torch(tmp_path: Path, graphs: str) -> None:
    """More adapters than slots and the base in one batch, with graphs and without."""
    base = make_checkpoint(tmp_path / "base", CONFIGS["qwen3"])
    paths = {str(seed): str(make_adapter(tmp_path / str(seed), base, seed=seed))
             for seed in range(5)}  # fmt: skip
    names: list[str | None] = [None, *paths, "0", "3"]
    prompts = [list(range(3 + 11 * number, 40 + 23 * number)) for number in range(len(names))]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)

    def answers(**options: str) -> list[list[int]]:
        with LLM(
            str(base), kind="builtin", skip_tokenizer=True, dtype="float32", num_blocks=200,
            adapters=paths, max_loras=3, max_batch_tokens=256, **options,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, adapter=names)
        return [output.outputs[0].token_ids for output in outputs]

    assert answers(device="cuda", cuda_graphs=graphs) == answers(device="cpu")
