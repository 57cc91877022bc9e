"""How fast an embedder or a reranker is: `parrot-gateway bench embeddings`, or this module alone.

    python -m parrot_bench.engine.embeddings --model BAAI/bge-m3 --texts 512 --tokens 256

Random token ids through the pooling engine: texts of one length, and texts of all lengths up to
twice that. Prints tokens a second and milliseconds a step. Without `--model` the shape of
Qwen3-Embedding-0.6B with random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from parrot_engine.exceptions import ParrotEngineError
from parrot_engine.loading.factory import (
    EngineOptions,
    add_engine_flags,
    given_options,
    load_engine_alone,
)
from parrot_engine.progress import print_line
from parrot_engine.protocol import Engine, Failed, FreeContext, Pool

from parrot_bench.engine.report import machine, memory

#: Qwen3-Embedding-0.6B.
_SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_669,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_MODULES = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))


class Measured(NamedTuple):
    """One case: medians of its repetitions."""

    case: str
    tokens: int
    tokens_per_s: float
    step_ms: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if parsed.model is None:
                write_shape(Path(folder))
                parsed.model, parsed.dummy_weights = folder, True
            options = EngineOptions(**given_options(parsed))
            print_line(f"loading {options.model} …")
            engine = load_engine_alone(options)
        return _measure(engine, parsed)
    except ParrotEngineError as error:
        print_line(f"error: {error}")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parrot-gateway bench embeddings",
        description="Measure the engine of vectors and scores on random token ids.",
    )
    parser.add_argument("--model", help="a folder or hub id (default: a shape of 0.6B parameters)")
    parser.add_argument("--texts", type=int, default=512, help="of a case (default: 512)")
    parser.add_argument("--tokens", type=int, default=256, help="of a text (default: 256)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each case (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    add_engine_flags(
        parser, "device", "dtype", "max_batch_size", "max_batch_tokens", "num_threads",
        "dummy_weights",
    )  # fmt: skip
    return parser


def write_shape(folder: Path) -> None:
    """Write the configuration of the default model into a folder."""
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in _MODULES
    ]
    (folder / "1_Pooling").mkdir()
    for name, value in (
        ("config.json", _SHAPE),
        ("modules.json", modules),
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": True}),
    ):
        (folder / name).write_text(json.dumps(value), encoding="utf-8")


def _measure(engine: Engine, parsed: argparse.Namespace) -> int:
    info = engine.info
    if info.pooling is None:
        print_line(f"error: {info.model} makes no vectors and no scores")
        return 1
    longest = info.pooling.max_tokens
    draw = random.Random(0)
    lengths = {
        "one length": [min(parsed.tokens, longest)] * parsed.texts,
        "all lengths": [
            min(draw.randint(1, 2 * parsed.tokens), longest) for _ in range(parsed.texts)
        ],
    }
    results = []
    for case, each in lengths.items():
        texts = [[draw.randrange(info.vocab_size) for _ in range(length)] for length in each]
        _run(engine, texts)
        rounds = [_run(engine, texts) for _ in range(parsed.repetitions)]
        seconds, steps = statistics.median(s for s, _ in rounds), rounds[0][1]
        tokens = sum(each)
        results.append(Measured(case, tokens, tokens / seconds, 1000 * seconds / steps))
    device = torch.device(info.device)
    where = f"{info.architecture}, {info.device}, {info.dtype}"
    print(f"{where}, {info.max_batch_tokens} tokens a step")
    print(f"{'case':<14}{'texts':>8}{'tokens':>10}{'tokens/s':>12}{'ms/step':>10}")
    for result in results:
        print(
            f"{result.case:<14}{parsed.texts:>8}{result.tokens:>10}"
            f"{result.tokens_per_s:>12,.0f}{result.step_ms:>10.2f}"
        )
    if parsed.json is not None:
        report = {
            "machine": machine(device),
            "memory": memory(device),
            "results": [result._asdict() for result in results],
        }
        parsed.json.write_text(json.dumps(report, indent=2), encoding="utf-8")
    engine.close()
    return 0


def _run(engine: Engine, texts: Sequence[list[int]]) -> tuple[float, int]:
    """Seconds and steps that all texts take; the results are on the host by then."""
    before = engine.stats().steps
    began = time.perf_counter()
    engine.submit([Pool(number, ids) for number, ids in enumerate(texts)])
    has_work = True
    while has_work:
        events, has_work = engine.step()
        for event in events:
            if isinstance(event, Failed) and event.code != "numerical_error":
                raise ParrotEngineError(event.message)
    seconds = time.perf_counter() - began
    engine.submit([FreeContext(number) for number in range(len(texts))])
    return seconds, engine.stats().steps - before


if __name__ == "__main__":
    sys.exit(main())
