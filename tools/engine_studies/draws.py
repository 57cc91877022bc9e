"""What a draw of one token a row costs: `python tools/engine_study.py draws`.

Microseconds on the device for some numbers of rows and kinds of draws, on logits that are all
alike (`flat`), normal, and of a few likely tokens (`peaked`), with Triton's kernel and with
torch's operators. The floor is the time to read the logits once.
"""

from __future__ import annotations

import argparse

import torch
from parrot_engine.batch import SamplingRow
from parrot_engine.bench.device import measure_limits, time_s
from parrot_engine.kernels.selection import Kernels
from parrot_engine.protocol import SamplingParams
from parrot_engine.runner.sampler import Largest, choose
from parrot_engine.runner.step_inputs import Upload, prepare
from torch import Tensor

from engine_studies.harness import emit

DRAWS = {
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k": SamplingParams(temperature=0.8, top_k=50),
    "both": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
}
#: Standard deviations of normal logits; the last of a cubed normal distribution.
SPREADS = {"flat": 0.03, "normal": 1.0, "peaked": 3.0}


def make_logits(kind: str, rows: int, vocab_size: int) -> Tensor:
    """Float32 `[rows, vocab_size]` on the device."""
    logits = torch.randn((rows, vocab_size), device="cuda")
    return SPREADS[kind] * (logits**3 / 4 if kind == "peaked" else logits)


@torch.inference_mode()
def time_draw(logits: Tensor, params: SamplingParams, *, by_kernel: bool) -> float:
    """Seconds of a draw from each row, the largest logits being known."""
    upload = Upload()
    rows = [SamplingRow(params, [], [], seed, frozenset()) for seed in range(len(logits))]
    inputs = prepare(rows, logits.shape[1], upload)
    upload.send(logits.device)
    values, tokens = logits.max(dim=-1)
    largest = Largest(values, tokens, tokens.clone())
    kernels: Kernels = "triton" if by_kernel else "torch"
    return time_s(lambda: choose(logits, inputs, largest=largest, kernels=kernels))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    rate = measure_limits().bytes_per_s
    torch.cuda.empty_cache()
    for count in options.rows:
        for kind in SPREADS:
            logits = make_logits(kind, count, options.vocab_size)
            entry: dict[str, object] = {"rows": count, "logits": kind}
            entry["floor_us"] = round(1e6 * logits.nbytes / rate, 1)
            for name, params in DRAWS.items():
                for by_kernel in (True, False):
                    label = f"{name}_us" if by_kernel else f"{name}_torch_us"
                    entry[label] = round(1e6 * time_draw(logits, params, by_kernel=by_kernel), 1)
            emit(entry)
