"""Models that run one context at a time: past key values that are kept, copied and dropped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CONFIGS, make_checkpoint
from harness.engine_checks import greedy, run_until_idle, tokens_of
from parrot_engine.huggingface import HuggingFaceSettings
from parrot_engine.huggingface.engine import ContextEngine, HuggingFaceEngine
from parrot_engine.protocol import Failed, Fill, Filled, FreeContext, Generate

SETTINGS = HuggingFaceSettings(
    device="cpu", dtype="float32", max_batch_tokens=64, paged_attention=False
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), CONFIGS["llama"])


def load(folder: Path, settings: HuggingFaceSettings = SETTINGS) -> ContextEngine:
    engine = HuggingFaceEngine.load(folder, settings, model="m")
    assert isinstance(engine, ContextEngine)
    return engine


def count_computed(engine: ContextEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of tokens of each forward pass."""
    model, counts = engine._past.model, list[int]()
    forward = model.forward

    def counted(input_ids: Any, **options: Any) -> Any:
        counts.append(input_ids.numel())
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "forward", counted)
    return counts


def test_few_caches_change_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    primitives: list[Any] = [Fill(0, list(range(50)))]
    for number in range(1, 7):
        primitives += [Fill(number, [number], parent_context_id=0), Generate(number, greedy(6))]
    engine = load(folder)
    once = count_computed(engine, monkeypatch)
    plenty = run_until_idle(engine, *primitives)
    engine = load(folder, replace(SETTINGS, max_cached_contexts=1, max_batch_size=2))
    again = count_computed(engine, monkeypatch)
    few = run_until_idle(engine, *primitives)
    assert sum(once) == 50 + 6 * 6
    # Of the forks one takes over what was computed, and five compute it again.
    assert sum(again) == sum(once) + 5 * 50
    for number in range(1, 7):
        assert tokens_of(few, number) == tokens_of(plenty, number)


def test_few_caches_change_no_prompt_logprob(folder: Path) -> None:
    """A Fill whose past key values are dropped between its chunks scores no token twice."""
    primitives = [
        Fill(number, list(range(number, 150)), prompt_logprobs=0, priority=1)
        for number in range(1, 5)
    ]
    plenty = run_until_idle(load(folder), *primitives)
    engine = load(folder, replace(SETTINGS, max_cached_contexts=1))
    engine.submit(primitives)
    few = engine.step().events
    # More urgent than the fill whose first chunk has been computed.
    few += run_until_idle(engine, Fill(9, [5]))
    assert engine.stats().preemptions > 0
    scores = [
        {e.context_id: e.prompt_logprobs for e in events if isinstance(e, Filled)}
        for events in (plenty, few)
    ]
    for number in range(1, 5):
        expected, found = scores[0][number], scores[1][number]
        assert expected is not None
        assert found is not None
        assert [item and item.token_id for item in found] == [None, *range(number + 1, 150)]
        for one, other in zip(found[1:], expected[1:], strict=True):
            assert one is not None
            assert other is not None
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_caches_go_with_their_contexts(folder: Path) -> None:
    engine = load(folder)
    run_until_idle(engine, Fill(1, [1, 2]), Fill(2, [3], parent_context_id=1))
    assert engine.stats().contexts == 2
    run_until_idle(engine, FreeContext(1), FreeContext(2))
    assert engine.stats().contexts == 0
    assert engine._past.num_cached == 0


def test_a_fork_that_is_freed_before_it_happens_keeps_nothing(folder: Path) -> None:
    engine = load(folder)
    run_until_idle(engine, Fill(1, [1, 2]), Fill(2, [3], parent_context_id=1), FreeContext(2))
    assert engine._past.num_cached == 1
    assert engine.stats().contexts == 1


def test_a_failing_forward_pass_fails_its_context_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folder)
    model = engine._past.model

    forward = model.forward

    def out_of_memory(input_ids: Any, **options: Any) -> Any:
        if 9 in input_ids:
            raise RuntimeError("out of memory")
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "forward", out_of_memory)
    events = run_until_idle(
        engine, Fill(1, [9]), Fill(2, [8]), Generate(2, greedy(2, logit_bias={9: -100.0}))
    )
    failed = [e for e in events if isinstance(e, Failed)]
    assert [(e.context_id, e.code) for e in failed] == [(1, "engine_error")]
    assert "memory" not in failed[0].message
    assert len(tokens_of(events, 2)) == 2


def test_it_does_not_page_its_kv(folder: Path) -> None:
    engine = load(folder)
    assert (engine.info.num_blocks, engine.stats().free_blocks) == (0, 0)
    assert not engine.info.reports_blocks
