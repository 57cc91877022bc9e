"""The profiles against what was measured: whole engines, not the numbers that they are made of."""

from __future__ import annotations

import random

import pytest
from parrot_bench.simulator.profiles import PROFILES, EngineProfile
from simulated import BLOCK, Bench

H200 = PROFILES["H200-8B"].with_(block_tokens=BLOCK)
#: Nothing that was measured on this device may be further off.
TOLERANCE = 0.05


def decode_ms(profile: EngineProfile, rows: int, shared: int, own: int, output: int) -> float:
    """Milliseconds of a decode step, as `bench engine` measures it: with the prompts cached."""
    bench = Bench(profile)
    prompts = [[("shared", shared), (("own", row), own)] for row in range(rows)]
    for row, prompt in enumerate(prompts):
        bench.submit(0.0, -1 - row, prompt, 1)
    measured = [bench.submit(60.0, row, prompt, output) for row, prompt in enumerate(prompts)]
    bench.run()
    ended = max(bench.ended_at[row] for row in range(rows))
    return 1000 * (ended - measured[-1].first_token_at) / (output - 1)


@pytest.mark.parametrize(("rows", "measured"), [(1, 4.26), (8, 4.50), (64, 6.11), (256, 13.0)])
def test_decode_steps_of_the_h200(rows: int, measured: float) -> None:
    assert decode_ms(H200, rows, 0, 512, 128) == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "measured", "within", "rate"),
    [
        ("H200-8B-FP8", (2.66, 3.37, 5.13, 10.7), (0.11, 0.11, 0.11, 0.11), 54_962),
        ("H200-8B-INT4", (2.18, 3.75, 6.68, 18.3), (0.23, 0.19, 0.03, 0.03), 41_654),
        ("H200x2-8B", (2.67, 3.01, 3.82, 7.71), (0.06, 0.06, 0.06, 0.06), 64_938),
    ],
)
def test_engines_of_other_formats_and_two_gpus(
    name: str, measured: tuple[float, ...], within: tuple[float, ...], rate: int
) -> None:
    """Their steps and whole steps of prompts; as close as a straight line comes to each."""
    profile = PROFILES[name]
    for rows, step_ms, tolerance in zip((1, 8, 64, 256), measured, within, strict=True):
        seconds = profile.step_s(sequences=rows, context_tokens=rows * 576)
        assert 1000 * seconds == pytest.approx(step_ms, rel=tolerance), rows
    assert 8192 / profile.step_s(prefill_tokens=8192) == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(("shares", "measured"), [(True, 6.31), (False, 12.5)])
def test_steps_behind_a_shared_prefix(shares: bool, measured: float) -> None:
    """64 x (6,144 shared + 128), 256 out; without shared attention the L2 cache still helps."""
    profile = H200.with_(shared_attention=shares)
    assert decode_ms(profile, 64, 6144, 128, 256) == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("rows", "shared", "layer_us", "gain"),
    [(64, 2048, 40, 2.7), (64, 1024, 36, 1.9), (32, 6144, 37, 3.8), (16, 6144, 27, 2.9)],
)
def test_attention_of_other_shapes(rows: int, shared: int, layer_us: float, gain: float) -> None:
    """The kernels' own times (bench/results/engine.md), which nothing was fitted to: 32 layers,
    each with some 12 us that a layer takes for a single short row, part of any step here.
    """
    for shares, measured_us in ((True, layer_us), (False, layer_us * gain)):
        attention_s = H200.with_(shared_attention=shares).step_s(
            context_tokens=shared + rows * 256, repeated_tokens=(rows - 1) * shared
        )
        model_us = 1e6 * (attention_s - H200.step_s()) / 32 + 12
        assert model_us == pytest.approx(measured_us, rel=0.2)


def test_prompts_filled_by_the_h200() -> None:
    bench = Bench(H200)
    for number in range(8):
        bench.submit(0.0, number, [(number, 8192)], 1)
    bench.run()
    rate = 8 * 8192 / max(bench.ended_at.values())
    assert rate == pytest.approx(37_201, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("decodes", "filled", "step_ms"),
    [
        *((1, 127, 7.4), (16, 127, 8.8), (64, 127, 9.5)),
        *((1, 255, 10.0), (16, 255, 12.1), (64, 255, 13.3)),
        *((1, 2048, 63), (16, 2048, 64), (64, 2048, 66)),
    ],
)
def test_prompts_beside_decodes_of_the_h200(decodes: int, filled: int, step_ms: float) -> None:
    """Steps of a long prompt's chunks beside chats: reading weights hides none of it."""
    seconds = H200.step_s(prefill_tokens=filled, sequences=decodes, context_tokens=decodes * 576)
    assert 1000 * seconds == pytest.approx(step_ms, rel=0.15)


def test_mixed_requests_of_the_h200() -> None:
    """512 at once, 64 to 1,024 tokens in, 16 to 512 out: prefill beside decodes, not fitted."""
    bench, draw, tokens = Bench(H200), random.Random(0), 0
    for number in range(512):
        output = draw.randint(16, 512)
        tokens += output
        bench.submit(0.0, number, [(number, draw.randint(64, 1024))], output)
    bench.run()
    assert tokens / max(bench.ended_at.values()) == pytest.approx(8471, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("rows", "prompt", "output", "steps", "step_ms"),
    [
        (1, 35, 150, 150, 5.40),
        (4, 35, 150, 151, 7.68),
        (16, 36, 150, 151, 14.57),
        (32, 36, 150, 153, 20.92),
        (1, 510, 150, 150, 6.93),
        (8, 510, 150, 158, 20.25),
        (4, 1510, 100, 111, 25.68),
        (1, 1510, 1, 3, 96.67),
        (8, 1510, 1, 24, 101.25),
    ],
)
def test_processor_time_of_the_demo_model(
    rows: int, prompt: int, output: int, steps: int, step_ms: float
) -> None:
    """Requests that arrive together at one engine process on a CPU."""
    bench = Bench(PROFILES["cpu-demo"])
    for row in range(rows):
        bench.submit(0.0, row, [(row, prompt)], output)
    bench.run()
    assert bench.engine.counts.steps == pytest.approx(steps, abs=max(3, steps // 20))
    assert 1000 * max(bench.ended_at.values()) == pytest.approx(steps * step_ms, rel=0.15)
