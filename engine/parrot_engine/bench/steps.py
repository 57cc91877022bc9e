"""Step times of a whole model with random weights: `python -m parrot_engine.bench.steps`.

The model has the shape of Llama-3.1-8B in bf16 (or a cut of its layers); contexts stand in the
cache as random numbers, so nothing has to be filled first. Two times a case: `eager`, the wall
clock of `ModelRunner.execute` and an argmax that is read back, as the engine calls it today; and
`device`, the same kernels replayed from a CUDA graph, which is what remains once the CPU is out
of the way. The engine itself does not capture graphs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from parrot_engine.attention.interface import AttentionShape
from parrot_engine.bench.device import measure_limits, time_s
from parrot_engine.bench.kernels import decode_load, prefill_load
from parrot_engine.builtin.batch import BatchRow, StepBatch
from parrot_engine.builtin.runner import ModelRunner
from parrot_engine.models.blocks import TensorSpec
from parrot_engine.models.decoder import Decoder
from parrot_engine.models.generation_defaults import GenerationDefaults
from parrot_engine.models.llama import read_config

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}


def dummy_runner(block_size: int, num_blocks: int, layers: int) -> ModelRunner:
    """A runner whose weights and cache are random."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    config = read_config({**LLAMA_8B, "num_hidden_layers": layers})
    model = Decoder(config, TensorSpec(device, dtype, "triton")).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    runner = ModelRunner(
        model,
        GenerationDefaults(eos_token_ids=[], sampling={}),
        num_blocks=num_blocks,
        block_size=block_size,
        device=device,
        dtype=dtype,
        kernels="triton",
    )
    runner.kv_cache.normal_()
    return runner


def time_steps(runner: ModelRunner, rows: Sequence[BatchRow], *, steps: int = 20) -> dict[str, Any]:
    """Seconds of a step of `rows`, eager and on the device alone."""
    batch = StepBatch([BatchRow(r.token_ids, r.start, r.block_table, "last") for r in rows])
    for _ in range(3):
        runner.execute(batch).argmax(dim=-1).tolist()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        runner.execute(batch).argmax(dim=-1).tolist()
        times.append(time.perf_counter() - begin)
    token_ids, positions, wanted = runner._indices(batch.rows)
    begin = time.perf_counter()
    plan = runner._attention.plan(batch.rows)
    plan_s = time.perf_counter() - begin

    def work() -> None:
        hidden = runner._model(token_ids, positions, runner.kv_cache, runner._attention, plan)
        runner._model.logits(hidden[wanted]).argmax(dim=-1)

    with torch.inference_mode():
        device_s = time_s(work, repeats=steps)
    return {
        "eager_ms": round(1000 * sorted(times)[len(times) // 2], 2),
        "device_ms": round(1000 * device_s, 2),
        "plan_ms": round(1000 * plan_s, 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=16)
    options = parser.parse_args(arguments)
    limits = measure_limits()
    print(json.dumps(limits._asdict()), flush=True)
    runner = dummy_runner(options.block_size, 300_000 // options.block_size, options.layers)
    config = runner._model.config
    shape = AttentionShape(
        config.num_heads, config.num_kv_heads, config.head_dim, options.block_size
    )
    weights = sum(p.nbytes for p in runner._model.parameters())
    weights -= runner._model.model.embed_tokens.weight.nbytes
    loads = [decode_load(batch, 576, shape) for batch in (1, 8, 64, 256)]
    loads.append(decode_load(64, 6144 + 256, shape, shared=6144))
    loads.append(prefill_load(8192, 0, shape))
    for load in loads:
        moved = weights + options.layers * load.bytes_moved
        bound_s = moved / limits.bytes_per_s
        if load.name.startswith("prefill"):
            tokens = len(load.rows[0].token_ids)
            # Two operations a weight of two bytes; the head sees one token only.
            head = config.vocab_size * config.hidden_size * 2
            flops = (weights - head) * tokens + options.layers * load.flops
            bound_s = flops / limits.flops_per_s
        entry = time_steps(runner, load.rows)
        share = round(1000 * bound_s / entry["device_ms"], 3)
        print(
            json.dumps(
                {
                    "case": load.name,
                    "bound_ms": round(1000 * bound_s, 2),
                    **entry,
                    "of_bound": share,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
