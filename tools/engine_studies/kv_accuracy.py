"""What rounding keys and values costs in accuracy: `python tools/engine_study.py kv_accuracy`.

Texts that the model has not seen are read in chunks, each behind what is in the cache (teacher
forcing), once for each way of storing it. `nats` is the mean loss a token; `same_top` the share of
places where the most probable token is that of the reference, the cache in the model's dtype; `kl`
the mean of KL(reference || this way) in nats, `kl_max` the largest of a place. Of every text the
first token is not predicted.

`fp8_e4m3` is the setting. With float32 on torch's kernels two more ways are rounded here, before
they are stored: `bfloat16`, and `fp8, no scales`: elements as they are, cut off at 448.

Texts are paragraphs of a file apart by lines of ***. They are read one by one (`passages`) and, as
far as the model's longest context goes, one behind the other (`joined`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from parrot_engine.attention.interface import AttentionBackend
from parrot_engine.batch import BatchRow, StepBatch
from parrot_engine.kernels.selection import resolve_kernels
from parrot_engine.loading.hub import DEMO_MODEL, resolve_model
from parrot_engine.models.loader import read_model_config, resolve_device
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings
from parrot_engine.text import Tokenizer
from parrot_engine.text.loading import load_text_assets
from torch import Tensor

from engine_studies.harness import emit, show_table

#: Passages of a checkout of the repository.
_PASSAGES = Path(__file__).parents[2] / "tests" / "engine" / "held_out_passages.txt"
_SEPARATOR = "\n\n***\n\n"
#: Tokens of a step.
CHUNK = 64
_LARGEST = 448.0

#: Rounds keys or values.
Round: TypeAlias = Callable[[Tensor], Tensor]


class Way(NamedTuple):
    """A way of storing keys and values."""

    name: str
    kv_cache_dtype: str
    #: What is done to them before.
    round: Round | None = None


REFERENCE = Way("as computed", "auto")
FP8 = Way("fp8_e4m3", "fp8_e4m3")
_ROUNDED = (
    Way("bfloat16", "auto", lambda heads: heads.bfloat16().to(heads.dtype)),
    Way(
        "fp8, no scales",
        "auto",
        lambda heads: heads.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).to(heads.dtype),
    ),
)


class _Rounding(AttentionBackend[Any]):
    """A back end over rounded keys and values."""

    def __init__(self, attention: AttentionBackend[Any], round_heads: Round) -> None:
        self._attention = attention
        self._round = round_heads

    def plan(self, rows: Sequence[BatchRow]) -> Any:
        """See the interface."""
        return self._attention.plan(rows)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, layer_kv: Tensor, plan: Any, **how: Any
    ) -> Tensor:
        """See the interface."""
        key, value = self._round(key), self._round(value)
        return self._attention.forward(query, key, value, layer_kv, plan, **how)


class Figures(NamedTuple):
    """What one way made of some texts; see the module."""

    tokens: int
    nats: float
    same_top: float
    kl: float
    kl_max: float


def ways_of(dtype: str, kernels: str) -> list[Way]:
    """What can be compared, the reference first."""
    rounded = _ROUNDED if (dtype, kernels) == ("float32", "torch") else ()
    return [REFERENCE, *rounded, FP8]


def measure(runners: Sequence[ModelRunner], texts: Sequence[Sequence[int]]) -> list[Figures]:
    """Figures for each of the runners, of which the first is the reference."""
    count = sum(len(text) - 1 for text in texts)
    sums = torch.zeros(len(runners), 3, dtype=torch.float64)
    largest = torch.zeros(len(runners), dtype=torch.float64)
    for text in texts:
        for expected, logits in _steps(runners, text):
            reference = logits[0].double().log_softmax(-1)
            top = reference.argmax(-1)
            for index, own in enumerate(logits):
                scores = own.double().log_softmax(-1)
                kl = (reference.exp() * (reference - scores)).sum(-1)
                loss = -scores.gather(1, expected.to(own.device)[:, None])
                same = scores.argmax(-1) == top
                sums[index] += torch.stack([loss.sum(), same.double().sum(), kl.sum()]).cpu()
                largest[index] = max(float(largest[index]), float(kl.max()))
    means = sums / count
    return [
        Figures(count, float(nats), float(same), float(kl), float(worst))
        for (nats, same, kl), worst in zip(means, largest, strict=True)
    ]


def _steps(
    runners: Sequence[ModelRunner], text: Sequence[int]
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Chunk by chunk the tokens that come next, and the score of each runner for them."""
    for start in range(0, len(text) - 1, CHUNK):
        inputs = list(text[start : start + CHUNK][: len(text) - 1 - start])
        table = list(range(-(-(start + len(inputs)) // runners[0].block_size)))
        batch = StepBatch([BatchRow(inputs, start, table, "all")])
        expected = torch.tensor(text[start + 1 : start + 1 + len(inputs)])
        yield expected, [runner.execute(batch) for runner in runners]


def load(folder: Path, way: Way, num_tokens: int, **given: Any) -> ModelRunner:
    """A runner with a cache for `num_tokens`, of settings `device`, `dtype` and `kernels`."""
    device = resolve_device(given["device"]).type
    block_size = BuiltinSettings.for_device(device).block_size
    settings = BuiltinSettings.for_device(
        device,
        num_blocks=-(-num_tokens // block_size),
        kv_cache_dtype=way.kv_cache_dtype,
        cuda_graphs="off",
        **given,
    )
    runner = load_runner(folder, settings)
    if way.round is not None:
        runner._attention = _Rounding(runner._attention, way.round)
    return runner


def _cells(entry: dict[str, Any]) -> tuple[str, ...]:
    return (
        entry["texts"],
        entry["kv"],
        str(entry["tokens"]),
        f"{entry['nats']:.4f}",
        f"{100 * entry['same_top']:.2f} %",
        f"{entry['kl']:.2e}",
        f"{entry['kl_max']:.2e}",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--model", default=DEMO_MODEL, help="a folder, a hub id, or parrot-demo")
    parser.add_argument("--text", type=Path, default=_PASSAGES, help="texts apart by lines of ***")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, … (default: cpu)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--kernels", default="auto", choices=("auto", "torch", "triton"))


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    device = resolve_device(options.device)
    kernels = resolve_kernels(options.kernels, device)
    folder = resolve_model(options.model)
    longest = read_model_config(folder).max_position
    tokenizer = Tokenizer(load_text_assets(folder))
    passages = options.text.read_text(encoding="utf-8").strip().split(_SEPARATOR)
    texts = {
        "passages": [tokenizer.encode(text)[:longest] for text in passages],
        "joined": [tokenizer.encode("\n\n".join(passages))[:longest]],
    }
    ways = ways_of(options.dtype, kernels)
    most = max(len(text) for group in texts.values() for text in group)
    runners = [
        load(folder, way, most, device=str(device), dtype=options.dtype, kernels=kernels)
        for way in ways
    ]
    subject = {"model": options.model, "dtype": options.dtype, "device": str(device)}
    rows: list[tuple[str, ...]] = [("texts", "KV", "tokens", "nats", "same_top", "kl", "kl_max")]
    for name, group in texts.items():
        for way, figures in zip(ways, measure(runners, group), strict=True):
            entry = {**subject, "texts": name, "kv": way.name, **figures._asdict()}
            emit(entry)
            rows.append(_cells(entry))
    show_table(rows)
