"""Decode steps with kernels that overlap and not: `python -m parrot_engine.bench.layer`.

Layers of one model's shape with random bf16 weights, each with weights and a cache of its own, as
many as it takes to be several times an L2 cache: norms, products and attention, no embedding and
no head. For each batch the same step is captured under every way of chaining (`kernels/dependent`)
and replayed; `us` is the median of a layer. Each way's hidden states are compared with those of
kernels that do not overlap: the bits must be the same, or `same` is false and the figure is worth
nothing. `--attention` times attention alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.triton_backend import TritonAttention
from parrot_engine.bench.device import time_s
from parrot_engine.bench.kernels import Load, decode_load
from parrot_engine.bench.steps import SHAPES, dummy_runner
from parrot_engine.builtin.runner import ModelRunner
from parrot_engine.kernels import dependent
from parrot_engine.kernels.dependent import Chaining
from parrot_engine.models.blocks import Step
from parrot_engine.models.ops import Residual

_BLOCK_SIZE = 64
_LAYERS = {"llama-8b": 8, "qwen-0.5b": 24}
_MB = 1 << 20
#: By name; the number is that of the megabytes of its weight that a product fetches ahead.
WAYS = {
    "off": dependent.OFF,
    "late": Chaining("late"),
    "early": Chaining("early"),
    "early-keys": Chaining("early", 0, keys_ahead=True),
    "late-8-keys": Chaining("late", 8 * _MB, keys_ahead=True),
    "early-8-keys": Chaining("early", 8 * _MB, keys_ahead=True),
    "early-16-keys": Chaining("early", 16 * _MB, keys_ahead=True),
    "early-32-keys": Chaining("early", 32 * _MB, keys_ahead=True),
}


def use_chaining(way: Chaining) -> None:
    """Launch kernels in this way from now on."""
    dependent.CHAINING = way


@contextmanager
def chaining(way: Chaining) -> Iterator[None]:
    """Launch kernels in this way for a while."""
    before = dependent.CHAINING
    use_chaining(way)
    try:
        yield
    finally:
        use_chaining(before)


class Layers:
    """The layers of a step of decodes, without embedding and head."""

    def __init__(self, runner: ModelRunner, load: Load) -> None:
        config = runner._model.config
        count = len(load.rows)
        assert isinstance(runner._attention, TritonAttention)
        self._runner = runner
        self._attention = runner._attention
        self._plan = runner._attention.plan(load.rows)
        self._hidden = torch.randn(count, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        positions = torch.tensor([row.start for row in load.rows], device="cuda")
        angles = runner._model._rotary.angles(positions, torch.bfloat16)
        self._angles = angles
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._qkv = torch.randn(count, width, device="cuda", dtype=torch.bfloat16)

    def layers(self) -> Tensor:
        """Hidden states behind the last layer."""
        model = self._runner._model
        step = Step(self._angles, self._attention, self._plan)
        residual = Residual(self._hidden)
        for layer, layer_kv in zip(
            model.model.layers, self._runner.kv_cache.unbind(0), strict=True
        ):
            residual = layer(residual, layer_kv, step)
        return residual.total()

    def attention(self) -> Tensor:
        """What the heads of all layers attend to, summed so that nothing is left out."""
        layers = self._runner._model.model.layers
        caches = self._runner.kv_cache.unbind(0)
        parts = [
            self._attention.forward_fused(
                self._qkv,
                self._angles.cos,
                self._angles.sin,
                None,
                layer_kv,
                self._plan,
                window=None,
                scale=layer.self_attn._scale,
            )
            for layer, layer_kv in zip(layers, caches, strict=True)
        ]
        return torch.stack(parts)


@torch.inference_mode()
def compile_all(runner: ModelRunner, loads: Sequence[Load], ways: Sequence[str]) -> None:
    """Run everything once, which leaves its kernels in Triton's cache on disk."""
    for load in loads:
        step = Layers(runner, load)
        for name in ways:
            with chaining(WAYS[name]):
                step.layers()


@torch.inference_mode()
def compare(
    runner: ModelRunner, loads: Sequence[Load], ways: Sequence[str], *, attention: bool
) -> None:
    """A line of JSON for each load and way."""
    layers = runner._model.config.num_layers
    for load in loads:
        step = Layers(runner, load)
        work = step.attention if attention else step.layers
        with chaining(dependent.OFF):
            expected = work()
        for name in ways:
            with chaining(WAYS[name]):
                seconds = time_s(work, repeats=30)
                # Twice in a row, as a graph does: what is wrong is wrong in the second.
                same = bool(torch.equal(work(), expected)) and bool(torch.equal(work(), expected))
            entry = {
                "what": "attention" if attention else "layer",
                "case": load.name,
                "way": name,
                "us": round(seconds / layers * 1e6, 2),
                "same": same,
            }
            print(json.dumps(entry), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--attention", action="store_true", help="attention alone")
    parser.add_argument("--shared", action="store_true", help="a shared prefix of 6,144 as well")
    parser.add_argument(
        "--warm", action="store_true", help="only compile, in a small process: one a way at a time"
    )
    options = parser.parse_args(arguments)
    layers = 1 if options.warm else _LAYERS[options.shape]
    runner = dummy_runner(_BLOCK_SIZE, 4096, layers, options.shape)
    config = runner._model.config
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, _BLOCK_SIZE)
    loads = [decode_load(batch, 576, shape) for batch in options.batches]
    if options.shared:
        loads.append(decode_load(64, 6400, shape, shared=6144))
    if options.warm:
        compile_all(runner, loads, options.ways)
        return
    compare(runner, loads, options.ways, attention=options.attention)


if __name__ == "__main__":
    main()
