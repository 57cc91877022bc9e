"""Decode steps of one model over several GPUs: `python tools/engine_study.py tensor_parallel`.

Random weights in the shape of a well-known model, greedy decodes with contexts of 576 tokens,
steps as the engine runs them (batcher, plan, graphs, sampling): the wall clock of consecutive
steps divided by their number, as in `steps`. One GPU is measured in the same run; `gain` is its
time over that of several. Of large shapes `--layers` takes the first ones, so that one GPU can
hold them: a part of the model is measured then, for both alike. Each way runs in a process of its
own, as a process can exchange peer memory only once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from parrot_engine.bench.device import Limits
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.loading.hub import resolve_model, shape_names
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings

from engine_studies.harness import emit
from engine_studies.steps import Bench, time_decode

_BLOCK_SIZE = 64
_CONTEXT = 576
_BATCHES = (1, 64)
#: For one way: loading, compiling and measuring.
_TIMEOUT_S = 600.0


class Way(NamedTuple):
    """How a model is spread."""

    size: int
    peer_memory: bool

    @property
    def name(self) -> str:
        """For the report."""
        if self.size == 1:
            return "one GPU"
        return f"{self.size} GPUs, {'peer memory' if self.peer_memory else 'NCCL alone'}"


def measure(folder: Path, way: Way, batches: Sequence[int]) -> dict[int, dict[str, float]]:
    """By batch size, the result of `time_decode`."""
    settings = BuiltinSettings.for_device(
        "cuda",
        device="cuda:0",
        dtype="bfloat16",
        block_size=_BLOCK_SIZE,
        num_blocks=(max(batches) + 1) * (_CONTEXT // _BLOCK_SIZE + 2),
        dummy_weights=True,
        cuda_graphs="lazy",
        tensor_parallel=way.size,
        peer_memory=way.peer_memory,
        max_context_tokens=4 * _CONTEXT,
    )
    begin = time.perf_counter()
    engine = BuiltinEngine.load(folder, settings, model="bench")
    load_s = round(time.perf_counter() - begin, 1)
    try:
        runner = engine._runner
        assert isinstance(runner, ModelRunner)
        assert runner._graphs is not None
        emit({"way": way.name, "load_s": load_s})
        # No bounds are computed.
        bench = Bench(runner, settings, runner._graphs, Limits(0.0, 0.0))
        return {batch: time_decode(bench, batch, _CONTEXT, 0, graphs=True) for batch in batches}
    finally:
        engine.close()


def _cut(folder: Path, layers: int | None, into: Path) -> Path:
    """The shape with fewer layers."""
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    (into / "config.json").write_text(json.dumps(config))
    return into


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--shape", default="llama-3.1-8b", help=", ".join(shape_names()))
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2], help="numbers of GPUs")
    parser.add_argument("--batches", type=int, nargs="+", default=list(_BATCHES))
    parser.add_argument("--no-nccl", action="store_true", help="with peer memory only")


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    ways = [Way(1, peer_memory=True)]
    for size in options.sizes:
        ways += [Way(size, peer) for peer in (True, False) if peer or not options.no_nccl]
    with tempfile.TemporaryDirectory() as cut:
        folder = resolve_model(options.shape, with_weights=False)
        folder = _cut(folder, options.layers, Path(cut))
        alone: dict[int, dict[str, float]] = {}
        for way in ways:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                found = process.submit(measure, folder, way, options.batches).result(_TIMEOUT_S)
            alone = alone or found
            for batch, entry in found.items():
                line = {
                    "shape": options.shape,
                    "layers": options.layers,
                    "way": way.name,
                    "batch": batch,
                    "step_ms": entry["ms"],
                    "host_ms": entry["host_ms"],
                    "steps_in_graphs": entry["graphs"],
                    "tokens_per_s": round(1000 * batch / entry["ms"]),
                    "gain": round(alone[batch]["ms"] / entry["ms"], 3),
                }
                emit(line)
