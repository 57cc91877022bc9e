"""Step times of a whole model with random weights: `parrot-gateway bench studies steps`.

The model has the shape of Llama-3.1-8B, or another one, in bf16. Three times a case:

- `device`: the step's kernels alone, replayed from a CUDA graph made for just this step;
- `engine`: a step as the engine runs it, batcher, plan, graphs and sampling included: the wall
  clock of consecutive steps of running generations, divided by their number;
- `eager`: the same without CUDA graphs.

`bound` is what the device's measured limits allow: weights and keys read once, or the arithmetic
of a prefill. The engine's decodes have contexts of the length named in the middle of the steps
that are timed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.batch import BatchRow
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.loading.hub import resolve_model
from parrot_engine.models.checkpoint import read_json
from parrot_engine.models.config import GenerationDefaults
from parrot_engine.models.decoder import Decoder
from parrot_engine.models.families.registry import family_of
from parrot_engine.models.parts import TensorSpec
from parrot_engine.protocol import Fill, FreeContext, Generate, Generated, SamplingParams
from parrot_engine.runner.graphs import CudaCapture, StepGraphs
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.runner.step_inputs import gather_tokens
from parrot_engine.settings import BuiltinSettings

from parrot_bench.engine.device import Limits, measure_limits, time_s
from parrot_bench.engine.studies.harness import emit
from parrot_bench.engine.studies.kernels import Load, decode_load, prefill_load

#: Names of `resolve_model`.
SHAPES = ("llama-3.1-8b", "qwen2.5-0.5b", "qwen3-30b-a3b")
#: Steps of the engine that are timed, and those before, in which all rows decode already.
STEPS, WARM_STEPS = 32, 16
#: A prefill is timed so often; the median counts.
PREFILLS = 5
#: Steps after which a case that makes no progress is given up.
_MAX_STEPS = 10_000

_CASES = ((1, 576, 0), (8, 576, 0), (64, 576, 0), (256, 576, 0), (64, 6400, 6144))
_PREFILL_TOKENS = 8192
_CACHE_TOKENS = 300_000


class Bench(NamedTuple):
    """A model on the device and what runs it."""

    runner: ModelRunner
    settings: BuiltinSettings
    graphs: StepGraphs
    limits: Limits


def decoder_of(runner: ModelRunner) -> Decoder:
    """The model of a runner of the builtin engine."""
    assert isinstance(runner._model, Decoder)
    return runner._model


def dummy_runner(
    block_size: int, num_blocks: int, layers: int | None = None, shape: str = SHAPES[0]
) -> ModelRunner:
    """A runner on the GPU whose weights and cache are random."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    raw = read_json(resolve_model(shape, with_weights=False) / "config.json")
    raw["num_hidden_layers"] = layers or raw["num_hidden_layers"]
    family = family_of(raw)
    config = family.read_config(raw)
    spec = TensorSpec(device, dtype, "triton")
    model = family.build(config, spec).eval()
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


@torch.inference_mode()
def time_device(runner: ModelRunner, rows: Sequence[BatchRow]) -> float:
    """Seconds of a step's kernels up to the largest logit, without the host."""
    tokens = gather_tokens(
        [BatchRow(row.token_ids, row.start, row.block_table, "last") for row in rows]
    )
    token_ids = torch.from_numpy(tokens.token_ids).cuda()
    positions = torch.from_numpy(tokens.positions).cuda()
    needed = None if tokens.logit_tokens is None else torch.from_numpy(tokens.logit_tokens).cuda()
    plan = runner._attention.plan(rows)

    def work() -> None:
        hidden = runner._model(token_ids, positions, runner.kv_cache, runner._attention, plan)
        runner._model.logits(hidden if needed is None else hidden[needed]).argmax(dim=-1)

    return time_s(work)


def _engine(bench: Bench, *, graphs: bool) -> BuiltinEngine:
    bench.runner._graphs = bench.graphs if graphs else None
    return BuiltinEngine(bench.runner, bench.settings, model="bench")


def _random_tokens(count: int, vocab_size: int) -> list[int]:
    return [random.randrange(vocab_size) for _ in range(count)]


def time_decode(
    bench: Bench, batch: int, context: int, shared: int, *, graphs: bool
) -> dict[str, float]:
    """Milliseconds of a step of running generations, and of what the host does in it."""
    engine = _engine(bench, graphs=graphs)
    vocab = engine.info.vocab_size
    before = WARM_STEPS + STEPS // 2
    sampling = SamplingParams(max_tokens=10_000, temperature=0, ignore_eos=True)
    if shared:
        engine.submit([Fill(0, _random_tokens(shared, vocab))])
        _run(engine, lambda _: engine.stats().filled_tokens >= shared)
    for number in range(1, batch + 1):
        own = _random_tokens(context - shared - before, vocab)
        engine.submit(
            [Fill(number, own, parent_context_id=0 if shared else None), Generate(number, sampling)]
        )
    started: set[int] = set()
    _run(engine, lambda seen: len(seen) == batch, started)
    for _ in range(WARM_STEPS):
        engine.step()
    torch.cuda.synchronize()
    replays = bench.graphs.num_replays
    begin = time.perf_counter()
    busy = time.thread_time()
    for _ in range(STEPS):
        engine.step()
    wall_s, busy_s = time.perf_counter() - begin, time.thread_time() - busy
    replays = bench.graphs.num_replays - replays
    engine.submit([FreeContext(number) for number in range(batch + 1)])
    _run(engine, lambda _: not engine.stats().contexts)
    return {
        "ms": round(1000 * wall_s / STEPS, 3),
        "host_ms": round(1000 * busy_s / STEPS, 3),
        "graphs": replays / STEPS,
    }


def time_prefill(bench: Bench, tokens: int, *, graphs: bool) -> float:
    """Milliseconds from a prompt's arrival to its first token; nothing else runs."""
    engine = _engine(bench, graphs=graphs)
    times = []
    for number in range(PREFILLS):
        prompt = _random_tokens(tokens, engine.info.vocab_size)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        sampling = SamplingParams(max_tokens=1, temperature=0)
        engine.submit([Fill(number, prompt), Generate(number, sampling)])
        _run(engine, lambda seen: len(seen) == 1)
        times.append(time.perf_counter() - begin)
        engine.submit([FreeContext(number)])
    return round(1000 * sorted(times)[len(times) // 2], 2)


def _run(engine: BuiltinEngine, over: Any, seen: set[int] | None = None) -> None:
    """Step until `over` (of the contexts that generated something) is true."""
    seen = set() if seen is None else seen
    for _ in range(_MAX_STEPS):
        for event in engine.step().events:
            if isinstance(event, Generated):
                seen.add(event.context_id)
        if over(seen):
            return
    raise RuntimeError(f"no end after {_MAX_STEPS} steps")


def _bound_ms(bench: Bench, load: Load) -> float:
    model, limits = decoder_of(bench.runner), bench.limits
    config = model.config
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if model.lm_head is not None:
        weights -= model.model.embed_tokens.weight.nbytes
    if load.name.startswith("prefill"):
        tokens = len(load.rows[0].token_ids)
        # Two operations a weight of two bytes; the head sees one token only.
        head = config.vocab_size * config.hidden_size * 2
        flops = (weights - head) * tokens + config.num_layers * load.flops
        return 1000 * float(flops) / limits.flops_per_s
    return 1000 * float(weights + config.num_layers * load.bytes_moved) / limits.bytes_per_s


def _report(bench: Bench, load: Load, entry: dict[str, Any]) -> None:
    bound = _bound_ms(bench, load)
    device_ms = 1000 * time_device(bench.runner, load.rows)
    line = {
        "case": load.name,
        "bound_ms": round(bound, 2),
        "device_ms": round(device_ms, 3),
        **entry,
        "device_of_bound": round(bound / device_ms, 3),
        "engine_of_bound": round(bound / entry["engine_ms"], 3),
    }
    emit(line)


def run_cases(bench: Bench, shape: AttentionShape, *, with_eager: bool) -> None:
    """All cases, a line of JSON each."""
    for batch, context, shared in _CASES:
        engine = time_decode(bench, batch, context, shared, graphs=True)
        entry = {
            "engine_ms": engine["ms"],
            "host_ms": engine["host_ms"],
            "steps_in_graphs": engine["graphs"],
        }
        if with_eager:
            eager = time_decode(bench, batch, context, shared, graphs=False)
            entry |= {"eager_ms": eager["ms"], "eager_host_ms": eager["host_ms"]}
        _report(bench, decode_load(batch, context, shape, shared=shared), entry)
    entry = {"engine_ms": time_prefill(bench, _PREFILL_TOKENS, graphs=True)}
    _report(bench, prefill_load(_PREFILL_TOKENS, 0, shape), entry)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--no-eager", action="store_true", help="with CUDA graphs only")


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    limits = measure_limits()
    torch.cuda.empty_cache()
    emit({"shape": options.shape, **limits._asdict()})
    settings = BuiltinSettings.for_device(
        "cuda", device="cuda", dtype="bfloat16", block_size=options.block_size
    )
    num_blocks = _CACHE_TOKENS // options.block_size
    runner = dummy_runner(options.block_size, num_blocks, options.layers, options.shape)
    config = runner._model.config
    shape = AttentionShape(
        config.num_heads, config.num_kv_heads, config.head_dim, options.block_size
    )
    begin = time.perf_counter()
    free, _ = torch.cuda.mem_get_info()
    graphs = runner.use_graphs(
        CudaCapture(torch.device("cuda")),
        max_rows=settings.max_batch_size,
        max_context=runner.max_position,
        max_tokens=settings.max_batch_tokens,
    )
    assert graphs is not None
    graphs.capture_all()
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info()[0]
    capture_s = round(time.perf_counter() - begin, 2)
    emit({"graphs": len(graphs.keys), "capture_s": capture_s, "capture_bytes": taken})
    bench = Bench(runner, settings, graphs, limits)
    run_cases(bench, shape, with_eager=not options.no_eager)
