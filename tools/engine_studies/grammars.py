"""What grammars cost the host: compiling one, and a mask for each token.

    python tools/engine_study.py grammars

Over the demo model's vocabulary, and over a made one of 128,000 tokens: random words of 1 to 12
letters, digits and spaces, beside all single bytes. Texts are random walks: each token is drawn
evenly from those that its mask allows, which strays further than a model does. Masks are given in
CPU time of the thread that makes them, compiling in wall-clock time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import numpy as np
from parrot_engine.engine.grammar import GrammarCompiler
from parrot_engine.loading.hub import DEMO_MODEL, resolve_model
from parrot_engine.protocol import Grammar
from parrot_engine.text.loading import load_text_assets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
        "home": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "any object": Grammar("json_object"),
    "regex": Grammar("regex", r"[A-Z][a-z]{3,20}( [a-z]{2,12}){3,9}\."),
    "choice": Grammar("choice", json.dumps([f"answer number {n}" for n in range(50)])),
}


def made_vocabulary(size: int) -> str:
    """A byte-level tokenizer of `size` tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    source = random.Random(0)  # noqa: S311 -- a made vocabulary
    words = dict.fromkeys(alphabet)
    letters = "etaoinshrdlucmfwypvbgkjqxz" * 4 + "0123456789.,:;\"'{}[]()-_ETAOINS"
    while len(words) < size:
        start = "Ġ" if source.random() < 0.5 else ""
        words.setdefault(start + "".join(source.choices(letters, k=source.randint(1, 12))))
    vocabulary = {word: token for token, word in enumerate(words)}
    vocabulary["<end>"] = size
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    text: str = tokenizer.to_str()
    return text


def measure(
    compiler: GrammarCompiler, grammar: Grammar, width: int, end: int, tokens: int
) -> tuple[float, list[float]]:
    """Seconds to compile, and microseconds of each mask."""
    began = time.perf_counter()
    compiled = compiler.compile(grammar).result(60)
    compile_s = time.perf_counter() - began
    source = np.random.default_rng(0)
    times: list[float] = []
    while len(times) < tokens:
        matcher, text = compiled.matcher(), list[int]()
        while len(text) < 300:
            mask = np.zeros(-(-width // 32), dtype=np.int32)
            began = time.thread_time_ns()
            matcher.fill_mask(text, mask)
            times.append((time.thread_time_ns() - began) / 1e3)
            (allowed,) = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(source.choice(allowed))
            if token == end:
                break
            text.append(token)
    return compile_s, times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    del parser


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    demo = load_text_assets(resolve_model(DEMO_MODEL)).tokenizer_json
    for name, text, width, end in (
        ("demo, 4096 tokens", demo, 4096, 1),
        ("made, 128001 tokens", made_vocabulary(128_000), 128_001, 128_000),
    ):
        began = time.perf_counter()
        compiler = GrammarCompiler(text, vocab_size=width, eos_token_ids=[end])
        compiler.compile(Grammar("regex", "a")).result(60)
        print(f"{name}: vocabulary read in {time.perf_counter() - began:.2f} s")
        for label, grammar in GRAMMARS.items():
            compile_s, times = measure(compiler, grammar, width, end, 2000)
            times.sort()
            print(
                f"  {label:10}  compile {compile_s * 1e3:7.1f} ms   mask median "
                f"{statistics.median(times):6.1f} us   mean {statistics.fmean(times):6.1f}   "
                f"99 % {times[int(len(times) * 0.99)]:7.1f}   most {times[-1]:8.1f}"
            )
        compiler.close()
