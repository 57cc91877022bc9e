"""What the engine's loop costs and hides: `python tools/engine_study.py loop`.

`host`: CPU time of one `BuiltinEngine.step` of n decodes, with a runner that has every token at
once and computes nothing: what planning and applying take in Python. `device` (with a GPU): wall
clock of a step of a whole model with random weights, with and without overlapping steps, prompts
of 512 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from parrot_engine.batch import RowOutcome, Runner, SampledToken, StepBatch
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.protocol import Fill, Generate, SamplingParams
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings

from engine_studies.harness import emit

_TOKEN = RowOutcome(SampledToken(5, None))
_NO_TOKEN = RowOutcome()


class InstantRunner(Runner):
    """Every draw yields the same token."""

    def __init__(self) -> None:
        self.vocab_size = 32_000
        self.eos_token_ids: list[int] = []
        self.max_position = 100_000
        self.architecture = "InstantForCausalLM"
        self.dtype = "bfloat16"
        self.device = "cpu"
        self.num_blocks = 100_000
        self.block_size = 16
        self.default_sampling: dict[str, float] = {}

    def launch(self, batch: StepBatch) -> InstantLaunch:
        """A step that is over at once."""
        return InstantLaunch(batch)


class InstantLaunch:
    """Implements `Launch`."""

    def __init__(self, batch: StepBatch) -> None:
        self._batch = batch

    def sample(self) -> None:
        """The token is known."""

    def ready(self) -> bool:
        """Always."""
        return True

    def outcome(self) -> list[RowOutcome]:
        """A token for every row that samples."""
        return [_NO_TOKEN if wish is None else _TOKEN for wish in self._batch.sampling]


def start(engine: BuiltinEngine, rows: int, prompt_tokens: int, max_tokens: int) -> None:
    """Bring `rows` greedy generations to where each step is one token of each."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    for index in range(rows):
        tokens = [
            1 + index % 1000,
            *((7 * index + 13 * at) % 30_000 for at in range(1, prompt_tokens)),
        ]
        engine.submit([Fill(index, tokens), Generate(index, sampling)])
    while engine.stats().generated_tokens < 3 * rows or engine.stats().waiting:
        engine.step()


def host_ms(rows: int, *, steps: int) -> dict[str, float]:
    """Median and smallest CPU time of a step in milliseconds."""
    values = BuiltinSettings(max_batch_size=rows, max_batch_tokens=8192, overlap="on")
    engine = BuiltinEngine(InstantRunner(), values, model="instant")
    start(engine, rows, 512, 10_000)
    times = []
    for _ in range(steps):
        begin = time.thread_time()
        engine.step()
        times.append(1000 * (time.thread_time() - begin))
    return {"median_ms": round(statistics.median(times), 3), "min_ms": round(min(times), 3)}


def device_ms(runner: Runner, rows: int, overlap: str, *, steps: int) -> float:
    """Median wall clock of a step in milliseconds."""
    values = BuiltinSettings(
        max_batch_size=rows, max_batch_tokens=8192, block_size=runner.block_size, overlap=overlap
    )
    engine = BuiltinEngine(runner, values, model="dummy")
    start(engine, rows, 512, steps + 50)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        times.append(1000 * (time.perf_counter() - begin))
    return round(statistics.median(times), 2)


def _use_graphs(runner: ModelRunner, rows: int) -> None:
    from parrot_engine.runner.graphs import CudaCapture

    capture = CudaCapture(torch.device("cuda"))
    graphs = runner.use_graphs(capture, max_rows=rows, max_context=4096, max_tokens=8192)
    if graphs is not None:
        graphs.capture_all()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    torch.set_num_threads(1)
    for rows in options.rows:
        entry = {"case": "host", "rows": rows, **host_ms(rows, steps=options.steps)}
        emit(entry)
    if not torch.cuda.is_available():
        return
    from engine_studies.steps import dummy_runner

    runner = dummy_runner(16, 30_000, options.layers, options.shape)
    if options.graphs:
        _use_graphs(runner, max(options.rows))
    for rows in options.rows:
        for overlap in ("off", "auto", "on"):
            median = device_ms(runner, rows, overlap, steps=options.steps)
            entry = {"case": "device", "rows": rows, "overlap": overlap, "median_ms": median}
            emit(entry)
