"""Simulated engines find prefixes and outputs again."""

from __future__ import annotations

import pytest
from parrot_bench.simulator.engines.prompts import PromptMaker
from parrot_bench.simulator.plan import Segment
from simulated import BLOCK, Bench, profile, step


def test_a_hit_saves_exactly_its_tokens() -> None:
    bench = Bench(profile())
    bench.submit(0.0, 1, [("system", 1000), ("x", 10)], 4)
    hit = bench.submit(5.0, 2, [("system", 1000), ("y", 10)], 4)
    whole = bench.submit(9.0, 3, [("system", 1000), ("y", 24)], 4)
    again = bench.submit(13.0, 4, [("system", 1000), ("y", 24)], 4)
    bench.run()
    # Full blocks of the common 1,000 tokens; and never the last token's block.
    assert hit.cached == 1000 // BLOCK * BLOCK
    assert hit.first_token_at == 5.0 + step(1010 - hit.cached, 0)
    assert whole.cached == hit.cached
    assert again.cached == 1024 - BLOCK


def test_same_step_sharing() -> None:
    bench = Bench(profile())
    first = bench.submit(0.0, 1, [("system", 1024), ("x", 10)], 4)
    second = bench.submit(0.0, 2, [("system", 1024), ("y", 10)], 4)
    bench.run()
    assert (first.cached, second.cached) == (0, 1024)
    assert first.first_token_at == second.first_token_at == step(1034 + 10, 0)


def test_an_output_can_be_continued() -> None:
    bench = Bench(profile())
    bench.submit(0.0, 1, [("a", 100)], 61)
    turn = [("a", 100), (("output", 1), 61), ("more", 40)]
    second = bench.submit(5.0, 2, turn, 4)
    bench.run()
    # 161 tokens, of which the last has no KV: ten blocks.
    assert second.cached == 160


def test_other_salts_share_nothing() -> None:
    maker = PromptMaker(BLOCK)
    segments = [Segment("a", 64)]
    one, two = maker.make("tenant 1", segments), maker.make("tenant 2", segments)
    assert not set(one.hashes()) & set(two.hashes())
    assert one.hashes() == PromptMaker(BLOCK).make("tenant 1", segments).hashes()


def test_hashes_are_the_same_everywhere() -> None:
    prompt = PromptMaker(4).make("t", [Segment(("a", 1), 6), Segment("b", 1), Segment("c", 5)])
    assert prompt.tokens == 12
    assert prompt.hashes() == (0x1B653307492A133D, 0x8D7357DC16FC5521, 0x2BAAD1959646D136)


def test_least_recently_used_goes_first() -> None:
    bench = Bench(profile(capacity_tokens=3200))
    for at, name in ((0.0, "a"), (2.0, "b"), (4.0, "c"), (6.0, "a")):
        bench.submit(at, int(at), [(name, 1024)], 1)
    bench.submit(8.0, 8, [("d", 1024)], 1)
    late = [bench.submit(10.0 + 2 * i, 10 + i, [(n, 1024)], 1) for i, n in enumerate("acb")]
    bench.run()
    assert [s.cached > 900 for s in late[:2]] == [True, True]
    assert late[2].cached < 900


@pytest.mark.parametrize("retention", ["keep", "normal", "drop"])
def test_retention_decides_who_goes(retention: str) -> None:
    bench = Bench(profile(capacity_tokens=3200))
    bench.submit(0.0, 1, [("a", 1024)], 1, application="A", retention=retention)
    bench.submit(2.0, 2, [("b", 1024)], 1, application="B", retention="keep")
    bench.submit(4.0, 3, [("c", 1024)], 1, application="C")
    bench.submit(6.0, 4, [("d", 1024)], 1, application="D", retention="drop")
    bench.run(until=7.0)
    again = {
        name: bench.engine.cache.match(bench.maker.make("t", [Segment(name, 1024)]).parts)
        for name in "abcd"
    }
    held = {name for name, match in again.items() if match.blocks == 64}
    assert (
        held
        == {"keep": {"a", "b", "d"}, "normal": {"b", "c", "d"}, "drop": {"b", "c", "d"}}[retention]
    )
    bench.engine.forget("B")
    bench.submit(8.0, 5, [("e", 1024)], 1)
    bench.run()
    assert bench.engine.cache.match(bench.maker.make("t", [Segment("b", 1024)]).parts).blocks < 64


def test_what_others_use_is_not_dropped_with_an_application() -> None:
    bench = Bench(profile(capacity_tokens=3200))
    bench.submit(0.0, 1, [("system", 1024), ("a", 512)], 1, application="A")
    bench.submit(2.0, 2, [("system", 1024), ("b", 512)], 1, application="B")
    bench.submit(4.0, 3, [("c", 512)], 1, application="C")
    bench.run()
    bench.engine.forget("A")
    bench.engine.forget("B")
    bench.submit(6.0, 4, [("d", 1024)], 1)
    bench.run()
    held = bench.engine.cache.match(bench.maker.make("t", [Segment("system", 1024)]).parts)
    assert held.blocks == 64


def test_own_copy_in_the_way() -> None:
    """The whole prompt is cached, yet its last block must be computed again beside the copy."""
    bench = Bench(profile(capacity_tokens=1024))
    bench.submit(0.0, 1, [("a", 1024)], 1)
    again = bench.submit(5.0, 2, [("a", 1024)], 1)
    bench.run()
    assert again.generated == 1


def test_shared_prefix_is_read_once() -> None:
    prompt = [("system", 4096)]
    times = {}
    for shared in (False, True):
        kind = profile(shared_attention=shared, capacity_tokens=65_536)
        bench = Bench(kind)
        bench.submit(0.0, 0, prompt, 1)
        for task in range(1, 9):
            bench.submit(4.0, task, [*prompt, (task, 16)], 101)
        bench.run()
        context = [4096 + 8 * (16 + g) for g in range(1, 101)]
        steps = [kind.step_s(context_tokens=c, repeated_tokens=7 * 4096) for c in context]
        times[shared] = 4.0 + step(8 * 16, 0) + sum(steps)
        assert bench.ended_at[8] == pytest.approx(times[shared], abs=1e-9)
    assert times[True] < times[False]


def test_a_prefix_that_only_one_has_is_not_read_again() -> None:
    kind = profile(capacity_tokens=65_536)
    bench = Bench(kind)
    for task in range(2):
        bench.submit(0.0, task, [(task, 4096)], 101)
    bench.run()
    filled = 4 * step(2048, 0)
    decode = sum(step(0, 2 * (4096 + g)) for g in range(1, 101))
    assert max(bench.ended_at.values()) == pytest.approx(filled + decode, rel=0.02)
