"""What draft tokens bring and cost: `python tools/engine_study.py speculation`.

`forced` (needs a GPU): generations of a model with random weights, in the shape of Llama-3.1-8B.
Random weights repeat nothing, so every row gets k made-up draft tokens, and the given share of them
is taken for right whatever the model sampled; computing, sampling and checking are the engine's.
`ms` is the wall clock of a step, `gain` the tokens a second over those without draft tokens
(`drafts` 0, which overlaps its steps). No row pauses, and the limit on tokens of a step is off.

`ruled` (needs a GPU): the same with as many draft tokens as the engine's own rule makes, up to k.

`unguessed` (needs a GPU): the real draft tokens on text that does not repeat (drawn tokens of
random weights): what the option costs where it brings nothing.

`demo` (CPU): the demo model continues texts that repeat and texts that do not, with real drafts.
CPU time, best of three runs in turn; outputs are compared.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from parrot_engine.batch import RowOutcome, Runner, SampledToken
from parrot_engine.engine.batcher import Batcher
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.engine.context_store import ContextStore
from parrot_engine.engine.contexts import Context, PlannedRow
from parrot_engine.engine.ngrams import NgramProposer
from parrot_engine.engine.speculation import Speculation
from parrot_engine.kv_cache.block_pool import BlockPool
from parrot_engine.kv_cache.host_tier import HostTier
from parrot_engine.llm import LLM
from parrot_engine.protocol import Fill, Generate, SamplingParams
from parrot_engine.settings import BuiltinSettings

from engine_studies.harness import emit, show_table

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_WARM_STEPS = 8
_MAX_STEPS = 10_000

_PARAGRAPH = (
    "The old lighthouse stood on a rock at the mouth of the bay. Every evening the keeper climbed "
    "the stairs with his lamp, and every morning he came down again and wrote in his book what "
    "ships had passed. Nobody read the book, but he wrote it all the same.\n\n"
)
_TEXTS = {
    "copies": 2 * _PARAGRAPH + "The old lighthouse stood on a rock",
    "goes on": "It was late in the autumn when the two brothers came to the town, and",
}


class _ForcedSpeculation(Speculation):
    """The same number of made-up draft tokens for every generation, whatever came of the last."""

    def __init__(self, settings: BuiltinSettings) -> None:
        super().__init__(settings)
        self._count = settings.speculative_tokens

    def choose(self, running: Sequence[Context]) -> dict[Context, list[int]]:  # type: ignore[override]
        """As many as requested."""
        return {
            context: list(range(1, self._count + 1))
            for context in running
            if context.speculative_generate is not None
        }


class _RuledSpeculation(Speculation):
    """Made-up draft tokens, as many as the engine's rule has room for."""

    def propose(self, context: Context, proposer: NgramProposer, count: int) -> list[int]:
        """Something, always."""
        return list(range(1, count + 1))


class _ForcedBatcher(Batcher):
    """Takes a share of the draft tokens for right."""

    def __init__(
        self,
        store: ContextStore,
        pool: BlockPool,
        settings: BuiltinSettings,
        host: HostTier | None,
        *,
        share: float,
        speculation: type[Speculation],
    ) -> None:
        super().__init__(store, pool, settings, host)
        if settings.speculative_tokens > 0:
            self.speculation = speculation(settings)
        self._share = share
        self._owed = 0.0

    def verify_drafts(
        self, planned: PlannedRow, outcome: RowOutcome
    ) -> list[tuple[PlannedRow, RowOutcome]]:
        """As if the model had sampled them."""
        drafts = planned.drafts
        self._owed += self._share * len(drafts)
        count = int(self._owed)
        self._owed -= count
        sampled = [*drafts[:count], 0, *drafts[count:]][: len(drafts) + 1]
        tokens = [SampledToken(token, None) for token in sampled]
        return super().verify_drafts(
            planned, outcome._replace(token=tokens[0], following=tokens[1:])
        )


def _forced_engine(
    runner: Runner, settings: BuiltinSettings, share: float, speculation: type[Speculation]
) -> BuiltinEngine:
    """With a share of right draft tokens."""
    make_batcher = partial(_ForcedBatcher, share=share, speculation=speculation)
    return BuiltinEngine(runner, settings, model="forced", make_batcher=make_batcher)


def time_steps(
    engine: BuiltinEngine, rows: int, *, prompt_tokens: int, steps: int, temperature: float = 0.0
) -> dict[str, float]:
    """Wall clock of steps of `rows` running generations, and the tokens that they brought."""
    source = random.Random(1)  # noqa: S311 -- any tokens will do
    sampling = SamplingParams(10_000, temperature=temperature, ignore_eos=True, seed=1)
    for number in range(rows):
        tokens = [source.randrange(engine.info.vocab_size) for _ in range(prompt_tokens)]
        engine.submit([Fill(number, tokens), Generate(number, sampling)])
    for _ in range(_MAX_STEPS):
        engine.step()
        stats = engine.stats()
        if stats.running == rows and stats.generated_tokens >= rows and not stats.waiting:
            break
    for _ in range(_WARM_STEPS):
        engine.step()
    before = engine.stats()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    wall_s = time.perf_counter() - begin
    after = engine.stats()
    num_steps = after.steps - before.steps
    generated = after.generated_tokens - before.generated_tokens
    proposed = after.proposed_tokens - before.proposed_tokens
    return {
        "ms": round(1000 * wall_s / num_steps, 3),
        "tokens_per_s": round(generated / wall_s, 1),
        "tokens_per_step": round(generated / num_steps, 2),
        "proposed_per_step": round(proposed / num_steps, 2),
    }


_CASES: dict[str, type[Speculation]] = {"forced": _ForcedSpeculation, "ruled": _RuledSpeculation}


def run_forced(
    runner: Runner,
    batches: Sequence[int],
    drafts: Sequence[int],
    *,
    prompt_tokens: int = 512,
    steps: int = 40,
) -> list[dict[str, Any]]:
    """One entry a case, the ones without draft tokens first."""
    entries: list[dict[str, Any]] = []

    def settings(rows: int, count: int) -> BuiltinSettings:
        return BuiltinSettings(
            block_size=runner.block_size,
            max_batch_size=rows,
            max_batch_tokens=8192,
            speculative_tokens=count,
            speculative_batch_tokens=256,
        )

    def measure(
        rows: int, count: int, share: float, speculation: type[Speculation] = _ForcedSpeculation
    ) -> dict[str, float]:
        engine = _forced_engine(runner, settings(rows, count), share, speculation)
        return time_steps(engine, rows, prompt_tokens=prompt_tokens, steps=steps)

    for rows in batches:
        plain = measure(rows, 0, 0.0)
        entries.append({"case": "forced", "rows": rows, "drafts": 0, **plain, "gain": 1.0})
        for count, share, (case, speculation) in product(drafts, SHARES, _CASES.items()):
            found = measure(rows, count, share, speculation)
            gain = round(found["tokens_per_s"] / plain["tokens_per_s"], 2)
            what = {"case": case, "rows": rows, "drafts": count, "share": share}
            entries.append({**what, **found, "gain": gain})
        drawn = [
            time_steps(
                BuiltinEngine(runner, settings(rows, count), model="unguessed"),
                rows,
                prompt_tokens=prompt_tokens,
                steps=2 * steps,
                temperature=1.0,
            )
            for count in (0, 4)
        ]
        gain = round(drawn[1]["tokens_per_s"] / drawn[0]["tokens_per_s"], 3)
        entries.append({"case": "unguessed", "rows": rows, "drafts": 4, **drawn[1], "gain": gain})
    return entries


def run_demo(drafts: Sequence[int], *, max_tokens: int = 96) -> list[dict[str, Any]]:
    """The demo model on a CPU, one text at a time."""
    params = SamplingParams(max_tokens, temperature=0, ignore_eos=True)
    llms = {
        count: LLM(device="cpu", dtype="float32", prefix_caching=False, speculative_tokens=count)
        for count in (0, *drafts)
    }
    entries: list[dict[str, Any]] = []
    for name, text in _TEXTS.items():
        times: dict[int, list[float]] = {count: [] for count in llms}
        sampled: dict[int, list[int]] = {}
        shares: dict[int, float] = {}
        for _ in range(3):
            for count, llm in llms.items():
                before = llm.stats()
                begin = time.process_time()
                sampled[count] = llm.generate(text, params)[0].outputs[0].token_ids
                times[count].append(time.process_time() - begin)
                after = llm.stats()
                proposed = after.proposed_tokens - before.proposed_tokens
                accepted = after.accepted_tokens - before.accepted_tokens
                shares[count] = round(accepted / proposed, 2) if proposed else 0.0
        entries += [
            {
                "case": "demo",
                "text": name,
                "drafts": count,
                "share": shares[count],
                "tokens_per_s": round(max_tokens / min(times[count]), 1),
                "gain": round(min(times[0]) / min(times[count]), 2),
                "same_tokens": sampled[count] == sampled[0],
            }
            for count in llms
        ]
    for llm in llms.values():
        llm.close()
    return entries


def _gpu_runner(shape: str, layers: int | None, rows: int, prompt_tokens: int) -> Runner:
    from parrot_engine.runner.graphs import CudaCapture

    from engine_studies.steps import dummy_runner

    blocks = rows * (prompt_tokens + 1024) // 64
    runner = dummy_runner(64, blocks, layers, shape)
    graphs = runner.use_graphs(
        CudaCapture(torch.device("cuda")),
        max_rows=rows,
        max_context=prompt_tokens + 1024,
        max_tokens=8192,
    )
    if graphs is not None:
        graphs.capture_all()
    return runner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 7])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--demo", action="store_true", help="the demo model, even with a GPU")


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    torch.set_num_threads(1)
    entries: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        tokens = options.prompt_tokens
        runner = _gpu_runner(options.shape, options.layers, max(options.rows), tokens)
        entries += run_forced(
            runner, options.rows, options.drafts, prompt_tokens=tokens, steps=options.steps
        )
    if options.demo or not torch.cuda.is_available():
        entries += run_demo(options.drafts)
    columns = ("case", "text", "rows", "drafts", "share", "ms", "tokens_per_step", "gain")
    for entry in entries:
        emit(entry)
    cells = [tuple(str(entry.get(name, "")) for name in columns) for entry in entries]
    show_table([columns, *cells])
