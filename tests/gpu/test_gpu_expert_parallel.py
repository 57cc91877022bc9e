"""A mixture of experts over two GPUs, whole experts on each, says what it says on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA GPUs", allow_module_level=True)

from harness.engine.checkpoints import CONFIGS
from harness.engine.quantized_checkpoints import Written, write_checkpoint
from harness.engine.ranks import Process, Story, started
from transformers import PreTrainedConfig

pytestmark = pytest.mark.gpu

_RANKS: dict[str, Any] = {"tensor_parallel": 2, "enable_expert_parallel": True}
STORIES = [
    Story("whole experts, graphs", {**_RANKS, "cuda_graphs": "lazy"}),
    Story("whole experts, kernel by kernel", {**_RANKS, "cuda_graphs": "off"}),
    Story("parts of experts", {"tensor_parallel": 2, "cuda_graphs": "off"}),
    Story("alone", {"cuda_graphs": "lazy"}),
]
PACKED_STORIES = [
    Story(story.name, {**story.settings, "dtype": "bfloat16"})
    for story in STORIES
    if story.name != "parts of experts"
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Wide enough heads for the kernels; a dense layer as well."""
    sizes = {
        "hidden_size": 256,
        "head_dim": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 128,
    }
    config: PreTrainedConfig = CONFIGS["qwen3-moe"]
    config = type(config).from_dict({**config.to_dict(), **sizes})
    return write_checkpoint(tmp_path_factory.mktemp("experts"), "fp8-blocks", config)


@pytest.fixture(scope="module")
def process(written: Written, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("log") / "dense.log"
    with started(written.dense, "cuda:0", STORIES, log) as process:
        yield process


def test_tokens_are_those_of_one_gpu(process: Process) -> None:
    said = {story.name: process.told(story.name) for story in STORIES}
    expected = said["alone"]["said"]
    assert [len(tokens) for tokens in expected] == [40, 20, 30]
    for name, told in said.items():
        assert told["said"] == expected, name
    assert said["whole experts, graphs"]["graph_steps"] > 0


def test_packed_experts(written: Written, process: Process, tmp_path: Path) -> None:
    """In two bytes sums of ranks are rounded otherwise: the first tokens are the same."""
    for story in STORIES:
        process.told(story.name)
    with started(written.path, "cuda:0", PACKED_STORIES, tmp_path / "packed.log") as packed:
        said = {story.name: packed.told(story.name)["said"] for story in PACKED_STORIES}
    expected = said["alone"]
    for name, tokens in said.items():
        assert tokens[0][:4] == expected[0][:4], name
