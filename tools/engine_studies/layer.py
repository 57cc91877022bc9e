"""Layers of a decode step, without embedding and head: `python tools/engine_study.py layer`.

Layers of one model's shape with random bf16 weights, each with weights and a cache of its own, as
many as it takes to be several times an L2 cache: norms, products and attention. The same are
captured for each batch and replayed; `layer_us` and `attention_us` are medians for one layer, the
latter for attention alone, in a graph of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from parrot_engine.attention.interface import AttentionShape, Rotation
from parrot_engine.attention.triton_backend import TritonAttention
from parrot_engine.bench.device import time_s
from parrot_engine.models.ops import Residual
from parrot_engine.models.self_attention import LayerInputs
from parrot_engine.runner.model_runner import ModelRunner
from torch import Tensor

from engine_studies.harness import emit
from engine_studies.kernels import Load, decode_load
from engine_studies.steps import SHAPES, decoder_of, dummy_runner

_BLOCK_SIZE = 64
_LAYERS = {"llama-8b": 8, "qwen-0.5b": 24}


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
        [rotary] = decoder_of(runner)._rotaries
        self._angles = rotary.angles(positions, torch.bfloat16)
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._qkv = torch.randn(count, width, device="cuda", dtype=torch.bfloat16)

    def layers(self) -> Tensor:
        """Hidden states behind the last layer."""
        model = decoder_of(self._runner)
        step = LayerInputs((self._angles,), self._attention, self._plan)
        residual = Residual(self._hidden)
        for layer, layer_kv in zip(
            model.model.layers, self._runner.kv_cache.unbind(0), strict=True
        ):
            residual = layer(residual, layer_kv, step)
        return model._ops.total(residual)

    def attention(self) -> Tensor:
        """What the heads of the last layer attend to; all layers are computed."""
        model = decoder_of(self._runner)
        out = self._qkv
        for layer, layer_kv in zip(
            model.model.layers, self._runner.kv_cache.unbind(0), strict=True
        ):
            out = self._attention.forward_fused(
                self._qkv,
                self._angles.cos,
                self._angles.sin,
                None,
                layer_kv,
                self._plan,
                rotation=Rotation(model.config.head_dim),
                window=None,
                scale=layer.self_attn._scale,
            )
        return out


@torch.inference_mode()
def measure(runner: ModelRunner, loads: Sequence[Load]) -> None:
    """A line of JSON for each load."""
    layers = runner._model.config.num_layers
    for load in loads:
        step = Layers(runner, load)
        layer, attention = (
            round(time_s(work, repeats=30) / layers * 1e6, 2)
            for work in (step.layers, step.attention)
        )
        entry = {"case": load.name, "layer_us": layer, "attention_us": attention}
        emit(entry)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--shared", action="store_true", help="a shared prefix of 6,144 as well")


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    runner = dummy_runner(_BLOCK_SIZE, 4096, _LAYERS[options.shape], options.shape)
    config = runner._model.config
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, _BLOCK_SIZE)
    loads = [decode_load(batch, 576, shape) for batch in options.batches]
    if options.shared:
        loads.append(decode_load(64, 6400, shape, shared=6144))
    measure(runner, loads)
