"""What the host tier gives: `python tools/engine_study.py host_tier`.

Contexts that are together several times as large as the device's cache take turns, each asking for
one token and being freed. With the host tier their blocks come back from pinned memory; without it
they are computed again, in the same run, by the same model (random weights, random token ids):

- `alone`: time to the first token of one context after the other;
- `at once`: as many as fit on the device ask at the same time;
- `beside`: one after the other, while others decode: their time between tokens as well, and where
  the longest of these times come from (`step_log.py`).

Beside that, how fast blocks are copied, against one large copy from and to pinned memory.

Graphs are captured beforehand, as a server does it. With `--cuda-graphs lazy` the first step of a
number of rows captures its graph, and contexts that decode meanwhile wait.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.kv_cache.host_copies import BlockCopies, Copy
from parrot_engine.kv_cache.host_rates import load_copies
from parrot_engine.loading.hub import resolve_model, shape_names
from parrot_engine.protocol import Fill, FreeContext, Generate, Generated, SamplingParams
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings

from engine_studies.harness import emit
from engine_studies.step_log import StepLog, by_kind, kind_line, line, longest

#: A model for machines without a GPU.
_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
#: Contexts of which the device holds all, in multiples of what it holds altogether.
_OVERSIZE = 4
#: Contexts that decode meanwhile in `beside`, and their prompts.
_DECODES, _MAX_DECODE_TOKENS = 8, 512
#: Bytes of the large copy, and chunks of blocks that are timed.
_LARGE_BYTES = 256 << 20
_CHUNKS = 16
#: Seconds after which anything is given up, and between two looks at a copy.
_TIMEOUT_S = 60.0
_LOOK_S = 0.00002

_ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class Load(NamedTuple):
    """What takes turns."""

    prompts: list[list[int]]
    #: How many of them the device holds.
    fitting: int


class Driver:
    """Steps an engine, and notes when tokens come."""

    def __init__(
        self, runner: ModelRunner, settings: BuiltinSettings, copies: BlockCopies | None = None
    ) -> None:
        self.log = StepLog(runner, copies)
        self.engine = BuiltinEngine(
            self.log.runner, settings, model="bench", copies=self.log.copies
        )
        self._number = 0
        #: The decodes of `beside`.
        self.others: set[int] = set()

    def ask(self, prompts: Sequence[list[int]]) -> list[float]:
        """Let contexts ask for a token at the same time, and be freed; seconds each waited."""
        first = self._number + 1
        self._number += len(prompts)
        ids = range(first, first + len(prompts))
        begin = time.perf_counter()
        for number, tokens in zip(ids, prompts, strict=True):
            self.engine.submit([Fill(number, tokens), Generate(number, _ONE)])
        waited: dict[int, float] = {}
        deadline = begin + _TIMEOUT_S
        while len(waited) < len(prompts):
            for number in self.step():
                waited.setdefault(number, time.perf_counter() - begin)
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{len(prompts)} contexts got {len(waited)} tokens")
        self.engine.submit([FreeContext(number) for number in ids])
        self.step()
        return [waited[number] for number in ids]

    def step(self) -> list[int]:
        """One step; the contexts that got a token, but for the others'."""
        with self.log.step() as step:
            result = self.engine.step()
        got = [
            event.context_id
            for event in result.events
            if isinstance(event, Generated) and event.token_ids
        ]
        step.is_tick = not self.others.isdisjoint(got)
        return [number for number in got if number not in self.others]

    def start_others(self, prompts: Sequence[list[int]]) -> int:
        """Begin generations that go on until `stop_others`; the number of the next step."""
        endless = SamplingParams(max_tokens=1 << 20, temperature=0, ignore_eos=True)
        self.others = set(range(-len(prompts), 0))
        for number, tokens in zip(sorted(self.others), prompts, strict=True):
            self.engine.submit([Fill(number, tokens), Generate(number, endless)])
        deadline = time.perf_counter() + _TIMEOUT_S
        target = self.engine.stats().generated_tokens + 4 * len(prompts)
        while self.engine.stats().generated_tokens < target:
            self.step()
            if time.perf_counter() > deadline:
                raise TimeoutError("generations do not begin")
        return len(self.log.steps)

    def stop_others(self) -> None:
        """End them."""
        self.engine.submit([FreeContext(number, "drop") for number in self.others])
        self.step()
        self.others = set()


def measure(
    runner: ModelRunner, settings: BuiltinSettings, copies: BlockCopies | None, load: Load
) -> dict[str, Any]:
    """The figures of one engine, with `copies` or without."""
    driver = Driver(runner, settings, copies)
    engine = driver.engine
    cold = [driver.ask([tokens])[0] for tokens in load.prompts]
    before = engine.stats()
    # Without a host tier each takes as long as the others, and as long as the first time.
    again = load.prompts if copies is not None else load.prompts[: load.fitting // 2]
    alone = [driver.ask([tokens])[0] for tokens in again]
    after = engine.stats()
    found = (after.cached_tokens - before.cached_tokens) / sum(map(len, again))
    # Each time others, of which the device has lost everything since.
    first, second = load.fitting, 2 * load.fitting
    at_once = driver.ask(load.prompts[first : second - 1])
    vocab = runner.vocab_size
    own = min(_MAX_DECODE_TOKENS, len(load.prompts[0]) // 4)
    begin = driver.start_others([random_tokens(own, vocab) for _ in range(_DECODES)])
    in_turn = [*load.prompts[second:], *load.prompts[:second]]
    beside = [driver.ask([tokens])[0] for tokens in in_turn]
    gaps, end = driver.log.gaps(begin), len(driver.log.steps)
    driver.stop_others()
    between = [gap.seconds for gap in gaps]
    stats = engine.stats()
    engine.check_integrity()
    return {
        "first_time_ms": _ms(_at(cold, 0.5)),
        "alone_ms": _ms(_at(alone, 0.5)),
        "alone_p99_ms": _ms(_at(alone, 0.99)),
        "found": round(found, 4),
        "at_once": len(at_once),
        "at_once_mean_ms": _ms(sum(at_once) / len(at_once)),
        "at_once_last_ms": _ms(max(at_once)),
        "beside_ms": _ms(_at(beside, 0.5)),
        "between_tokens_ms": _ms(_at(between, 0.5)),
        "between_tokens_p99_ms": _ms(_at(between, 0.99)),
        "between_tokens_longest_ms": _ms(max(between)),
        "times_between_tokens": len(between),
        "longest_and_median": longest(gaps),
        "steps_beside": by_kind(driver.log.steps[begin:end]),
        "blocks_to_host": stats.blocks_to_host,
        "blocks_from_host": stats.blocks_from_host,
    }


def copy_rates(runner: ModelRunner, copies: BlockCopies) -> dict[str, float]:
    """GB/s of blocks out, in, and both at once (each way), against a large copy; the cache is lost.

    On a CPU the large copy is one in memory.
    """
    block_bytes = runner.kv_bytes_per_block
    count = min(copies.chunk, copies.num_slots, runner.num_blocks // 2)
    there, here = list(range(count)), list(range(runner.num_blocks - count, runner.num_blocks))

    def out() -> list[Copy]:
        return [copies.store(there, there) for _ in range(_CHUNKS)]

    def back() -> list[Copy]:
        return [copies.load(there, here, after=0, behind=[]) for _ in range(_CHUNKS)]

    moved = _CHUNKS * count * block_bytes / 1e9
    rates = {
        "blocks_out": moved / _copied_s(out),
        "blocks_in": moved / _copied_s(back),
        "blocks_both": moved / _copied_s(lambda: [*out(), *back()]),
    }
    device = runner.kv_cache.device
    on_gpu = device.type == "cuda"
    host = torch.empty(_LARGE_BYTES if on_gpu else 1 << 24, dtype=torch.uint8, pin_memory=on_gpu)
    other = torch.empty_like(host, device=device)
    for name, target, source in (("large_out", host, other), ("large_in", other, host)):
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            target.copy_(source)
            if on_gpu:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
        rates[name] = host.nbytes / 1e9 / _at(times, 0.5)
    return {name: round(rate, 2) for name, rate in rates.items()}


def _copied_s(work: Callable[[], list[Copy]]) -> float:
    """Seconds until copies are done, the second time."""
    elapsed = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        pending = work()
        while not all(copy.is_done() for copy in pending):
            if time.perf_counter() - begin > _TIMEOUT_S:
                raise TimeoutError("copies of blocks do not end")
            time.sleep(_LOOK_S)
        elapsed = time.perf_counter() - begin
    return elapsed


def random_tokens(count: int, vocab_size: int) -> list[int]:
    """Token ids, whichever."""
    return [random.randrange(vocab_size) for _ in range(count)]  # noqa: S311 -- any will do


def _at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    computed, brought = report["computed"], report["host_tier"]
    rows = [("", "computed", "host tier", "gain")]
    for label, key in (
        ("first time, alone", "first_time_ms"),
        ("again, alone", "alone_ms"),
        ("again, alone, p99", "alone_p99_ms"),
        (f"{brought['at_once']} at once, mean", "at_once_mean_ms"),
        (f"{brought['at_once']} at once, last", "at_once_last_ms"),
        (f"again, beside {_DECODES} decodes", "beside_ms"),
        ("between their tokens, median", "between_tokens_ms"),
        ("between their tokens, p99", "between_tokens_p99_ms"),
        ("between their tokens, longest", "between_tokens_longest_ms"),
    ):
        gain = f"{computed[key] / brought[key]:.1f}x" if brought[key] else ""
        rows.append((label, f"{computed[key]:.1f} ms", f"{brought[key]:.1f} ms", gain))
    rows.append(("found", f"{computed['found']:.0%}", f"{brought['found']:.0%}", ""))
    lines = [f"{a:<30}{b:>14}{c:>14}{d:>8}" for a, b, c, d in rows]
    rates = report["gb_per_s"]
    for way in ("out", "in"):
        share = rates[f"blocks_{way}"] / rates[f"large_{way}"]
        lines.append(
            f"blocks {way}: {rates[f'blocks_{way}']} GB/s, {share:.0%} of a large copy's "
            f"{rates[f'large_{way}']}"
        )
    lines.append(f"both ways at once: {rates['blocks_both']} GB/s each")
    for name, figures in (("computed", computed), ("host tier", brought)):
        lines.append(
            f"{name}: the longest of {figures['times_between_tokens']} times between tokens, and "
            "the median, by the steps that ended in them (ms):"
        )
        lines += map(line, figures["longest_and_median"])
        lines += map(kind_line, figures["steps_beside"])
    return "\n".join(lines)


def _settings(options: argparse.Namespace, device: str) -> tuple[BuiltinSettings, int]:
    """Settings whose cache holds a part of the contexts, and how many it holds."""
    size = BuiltinSettings.for_device(device).block_size
    blocks = -(-options.tokens // size) + 1
    fitting = max(2, options.contexts // _OVERSIZE)
    beside = _DECODES * (2 * min(_MAX_DECODE_TOKENS, options.tokens // 4) // size + 1)
    settings = BuiltinSettings.for_device(
        device,
        device=device,
        num_blocks=fitting * blocks + beside,
        host_blocks=(options.contexts + 2) * blocks,
        host_min_tokens=options.host_min_tokens,
        max_context_tokens=max(2 * options.tokens, 1 << 14 if device == "cuda" else 4096),
        dummy_weights=True,
        cuda_graphs=options.cuda_graphs,
    )
    return settings, fitting


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings, fitting = _settings(options, device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.shape == "tiny":
            (folder / "config.json").write_text(json.dumps(_TINY))
        else:
            folder = resolve_model(options.shape, with_weights=False)
        begin = time.perf_counter()
        runner = load_runner(folder, settings)
        load_s = time.perf_counter() - begin
    begin = time.perf_counter()
    copies, with_tier = load_copies(runner, settings)
    pin_s = time.perf_counter() - begin
    if copies is None:
        raise SystemExit("on this machine computing is faster than copying: no host tier")
    random.seed(0)
    vocab = runner.vocab_size
    load = Load([random_tokens(options.tokens, vocab) for _ in range(options.contexts)], fitting)
    # Warms up kernels too, so it is not counted.
    warm = Driver(runner, settings)
    for _ in range(2):
        warm.ask([random_tokens(options.tokens, vocab)])
    without = replace(settings, host_blocks=None)
    report = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "shape": options.shape,
        "contexts": options.contexts,
        "tokens": options.tokens,
        "device_blocks": settings.num_blocks,
        "host_blocks": settings.host_blocks,
        "cuda_graphs": settings.cuda_graphs,
        "host_gb": round(copies.num_slots * runner.kv_bytes_per_block / 1e9, 2),
        "load_s": round(load_s, 1),
        "pin_s": round(pin_s, 1),
        "host_min_tokens": with_tier.host_min_tokens,
        "computed": measure(runner, without, None, load),
        "host_tier": measure(runner, with_tier, copies, load),
        "gb_per_s": copy_rates(runner, copies),
    }
    copies.close()
    return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--shape", choices=["tiny", *shape_names()], default="llama-3.1-8b" if on_gpu else "tiny"
    )
    parser.add_argument("--contexts", type=int, default=64 if on_gpu else 16)
    parser.add_argument("--tokens", type=int, default=4096 if on_gpu else 256, help="of each")
    parser.add_argument("--host-min-tokens", type=int, help="measured when not given")
    parser.add_argument(
        "--cuda-graphs", choices=["auto", "lazy"], default="auto", help="auto: captured before"
    )


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    if options.contexts < 2 * _OVERSIZE:
        raise SystemExit(f"--contexts: at least {2 * _OVERSIZE}")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    begin = time.perf_counter()
    report = measure_all(options)
    report["wall_s"] = round(time.perf_counter() - begin, 1)
    print(table(report))
    emit(report)
