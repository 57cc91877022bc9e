"""The runner's own duties: rows of logits, copies of blocks, sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine.paged import PagedHarness, PagedSequence
from parrot_engine.batch import BatchRow, BlockCopy, LogitsNeed, SamplingRow, StepBatch
from parrot_engine.protocol import SamplingParams
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.runner.profiling import largest_step
from parrot_engine.settings import BuiltinSettings


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path: Path = make_checkpoint(tmp_path_factory.mktemp("runner"), CONFIGS["qwen3"])
    return load_runner(path, BuiltinSettings(device="cpu", dtype="float32", num_blocks=24))


def test_facts(runner: ModelRunner) -> None:
    assert runner.vocab_size == 257
    assert runner.eos_token_ids == [256]
    assert runner.max_position == 512
    assert runner.architecture == "Qwen3ForCausalLM"
    assert (runner.dtype, runner.device) == ("float32", "cpu")
    assert (runner.num_blocks, runner.block_size) == (24, 16)
    # 3 layers, K and V, 2 heads of 32, 16 tokens, 4 bytes
    assert runner.kv_bytes_per_block == 3 * 2 * 2 * 32 * 16 * 4
    cache = runner.kv_cache
    assert cache.numel() * cache.itemsize == 24 * runner.kv_bytes_per_block


def test_logits_come_in_the_order_of_rows(runner: ModelRunner) -> None:
    texts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    needs = ["last", "all", "none", "all"]
    harness = PagedHarness(runner)
    rows = [harness.row(PagedSequence(), t, n) for t, n in zip(texts, needs, strict=True)]
    logits = runner.execute(StepBatch(rows))
    assert logits.dtype == torch.float32
    assert logits.shape == (1 + 1 + 4, runner.vocab_size)
    alone = [harness.fill(PagedSequence(), text, chunk=10) for text in texts]
    expected = torch.cat([alone[0][-1:], alone[1], alone[3]])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_no_logits_wanted(runner: ModelRunner) -> None:
    harness = PagedHarness(runner)
    row = harness.row(PagedSequence(), [1, 2], "none")
    assert runner.execute(StepBatch([row])).shape == (0, runner.vocab_size)
    assert not runner.kv_cache[:, :, row.block_table[0], :, :2].isnan().any()


@pytest.mark.parametrize("need", ["last", "none"])
def test_rows_that_draw_nothing_get_no_token(runner: ModelRunner, need: LogitsNeed) -> None:
    harness = PagedHarness(runner)
    rows = [harness.row(PagedSequence(), [5, 6], each) for each in ("last", need, "last")]
    draw = SamplingRow(SamplingParams(temperature=0), [5, 6], [], 0, frozenset())
    outcomes = runner.launch(StepBatch(rows, sampling=[draw, None, draw])).outcome()
    tokens = [outcome.token for outcome in outcomes]
    assert tokens[1] is None
    assert tokens[0] == tokens[2] is not None


def test_the_largest_step_runs(runner: ModelRunner) -> None:
    settings = BuiltinSettings(max_batch_tokens=100, max_batch_size=5, max_logprob_tokens=20)
    batch = largest_step(settings, 60)
    assert [len(row.token_ids) for row in batch.rows] == [20, 1, 1, 60, 18]
    outcome = runner.launch(batch).outcome()
    assert all(row.token is not None for row in outcome)
    assert len(outcome[0].scores) == 20


def test_copies_without_rows(runner: ModelRunner) -> None:
    runner.kv_cache.copy_(torch.arange(24.0).view(1, 1, 24, 1, 1, 1).expand_as(runner.kv_cache))
    # One after the other: 2 gets 1, 3 gets what 2 holds by then, 1 is overwritten last.
    copies = [BlockCopy(1, 2), BlockCopy(2, 3), BlockCopy(9, 1), BlockCopy(1, 4)]
    assert runner.execute(StepBatch([], copies)).shape == (0, runner.vocab_size)
    assert runner.kv_cache[0, 0, :6, 0, 0, 0].tolist() == [0, 9, 1, 1, 9, 5]
    assert runner.kv_cache[2, 1, :6, 1, 15, 31].tolist() == [0, 9, 1, 1, 9, 5]


def test_copies_come_before_writes(runner: ModelRunner) -> None:
    harness = PagedHarness(runner)
    parent = PagedSequence()
    harness.fill(parent, [1, 2, 3], chunk=3)
    child, copies = harness.fork(parent)
    # The parent goes on in the step that forks it.
    rows = [harness.row(parent, [50, 51]), harness.row(child, [60])]
    together = runner.execute(StepBatch(rows, copies))
    alone = [
        harness.fill(PagedSequence(), tokens, chunk=10)[-1]
        for tokens in ([1, 2, 3, 50, 51], [1, 2, 3, 60])
    ]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-5, rtol=1e-5)


def test_a_context_with_nan_does_not_touch_its_neighbours(runner: ModelRunner) -> None:
    harness = PagedHarness(runner)
    sick, healthy = PagedSequence(), PagedSequence()
    harness.fill(sick, list(range(20)), chunk=20)
    harness.fill(healthy, list(range(40)), chunk=40)
    runner.kv_cache[:, :, sick.block_table] = float("nan")
    rows = [harness.row(sick, [1]), harness.row(healthy, [2])]
    logits = runner.execute(StepBatch(rows))
    assert logits[0].isnan().all()
    alone = harness.fill(PagedSequence(), [*range(40), 2], chunk=50)[-1]
    torch.testing.assert_close(logits[1], alone, atol=1e-5, rtol=1e-5)
    # The next owner of its blocks starts clean.
    reused = BatchRow([3, 4, 5], 0, sick.block_table[:1], "all")
    expected = harness.fill(PagedSequence(), [3, 4, 5], chunk=3)
    torch.testing.assert_close(runner.execute(StepBatch([reused])), expected, atol=1e-5, rtol=1e-5)
    follow_up = BatchRow([6], 3, sick.block_table[:1], "last")
    assert runner.execute(StepBatch([follow_up])).isfinite().all()
