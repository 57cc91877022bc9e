"""Steps through graphs are steps without: on the CPU, what a graph holds is repeated by calling it.

Kernels run in Triton's interpreter; tests/gpu captures real graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
import torch
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine.paged import PagedHarness, PagedSequence, greedy_row
from harness.lora_folders import make_adapter
from parrot_engine.attention.triton_backend import Parts, TritonAttention
from parrot_engine.batch import SampledToken, SamplingRow, StepBatch
from parrot_engine.protocol import SamplingParams
from parrot_engine.runner import sampler
from parrot_engine.runner.graphs import CaptureError, Key, StepGraphs, graph_keys
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")

MAX_ROWS, MAX_TOKENS, MAX_CONTEXT = 4, 24, 200


class Repeat:
    """In place of CUDA graphs: calls the work again."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.captured += 1
        result = work()

        def replay() -> None:
            result.copy_(work())

        return replay, result


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Two layers: what one leaves the next one takes.
    config = deepcopy(CONFIGS["qwen3"])
    config.num_hidden_layers = 2
    config.layer_types = config.layer_types[:2]
    return make_checkpoint(tmp_path_factory.mktemp("graphs"), config)


def _runner(path: Path) -> ModelRunner:
    return load_runner(
        path, BuiltinSettings(device="cpu", dtype="float32", num_blocks=32, kernels="triton")
    )


def _adapted_steps(runner: ModelRunner, folders: list[Path]) -> list[Tensor]:
    """Logits of steps with adapters and without; more adapters than slots."""
    assert runner.adapters is not None
    ids = []
    for folder in folders:
        adapter = runner.adapters.read(folder)
        runner.adapters.add(adapter)
        ids.append(adapter.id)
    harness = PagedHarness(runner)
    first, base, second = PagedSequence(), PagedSequence(), PagedSequence()

    def step(*rows: tuple[PagedSequence, list[int], str]) -> Tensor:
        batch = [harness.row(sequence, tokens, "last") for sequence, tokens, _ in rows]
        return runner.execute(StepBatch(batch, adapters=[adapter for *_, adapter in rows]))

    one, two, three = ids
    return [
        step((first, [1, 2, 3], one), (base, [6], ""), (second, [8, 9, 1], two)),
        step((base, [3], ""), (first, [5], one)),
        step((PagedSequence(), [4], three), (first, [6], one)),
    ]


def test_steps_with_adapters(path: Path, tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / str(seed), path, seed=seed) for seed in range(3)]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 32}
    plain, runner = [
        load_runner(path, BuiltinSettings(**options, kernels=kernels, max_loras=2))
        for kernels in ("torch", "triton")
    ]
    graphs = _graphs(runner, max_tokens=8)
    expected, ours = (_adapted_steps(each, folders) for each in (plain, runner))
    assert all(map(_close, ours, expected))
    assert (graphs.num_replays, graphs.num_misses) == (3, 0)
    assert runner.adapters is not None
    # The second one made room for the third.
    assert runner.adapters.num_writes == 3


def test_a_model_that_cannot_be_captured(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps are launched kernel by kernel, and it is not tried again."""

    class Refusing(Repeat):
        def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            self.captured += 1
            raise CaptureError("it waits for the device")

    expected, _ = PagedHarness(_runner(path)).generate([[1, 2, 3], [4, 5]], 4, chunk=8)
    runner = _runner(path)
    refusing = Refusing()
    graphs = _graphs(runner, refusing)
    graphs.capture_all()
    tokens, _ = PagedHarness(runner).generate([[1, 2, 3], [4, 5]], 4, chunk=8)
    assert tokens == expected
    assert (refusing.captured, graphs.num_replays) == (1, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "steps are launched kernel by kernel: it waits for the device"
    ]


def _graphs(
    runner: ModelRunner, capture: Repeat | None = None, max_tokens: int = MAX_TOKENS
) -> StepGraphs:
    graphs = runner.use_graphs(
        capture or Repeat(), max_rows=MAX_ROWS, max_context=MAX_CONTEXT, max_tokens=max_tokens
    )
    assert graphs is not None
    return graphs


def _close(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and float((ours - theirs).abs().max()) < 1e-4


def test_mixed_steps_and_steps_that_no_graph_holds(path: Path) -> None:
    prompts = [[5, 6, 7], list(range(20)), list(range(40, 73))]
    expected, expected_logits = PagedHarness(_runner(path)).generate(prompts, 4, chunk=30)
    runner = _runner(path)
    graphs = _graphs(runner)
    tokens, logits = PagedHarness(runner).generate(prompts, 4, chunk=30)
    assert tokens == expected
    assert all(map(_close, logits, expected_logits))
    # The chunk of 30 tokens is more than any graph holds.
    assert (graphs.num_replays, graphs.num_misses) == (6, 1)


def test_rows_without_logits_and_with_all(path: Path) -> None:
    def run(runner: ModelRunner) -> list[Tensor]:
        harness = PagedHarness(runner)
        first, second = PagedSequence(), PagedSequence()
        return [
            runner.execute(StepBatch(rows))
            for rows in (
                [harness.row(first, [1, 2, 3], "all"), harness.row(second, [4], "none")],
                [harness.row(first, [5], "none"), harness.row(second, [6], "last")],
                [harness.row(first, [7], "none"), harness.row(second, [8], "none")],
            )
        ]

    runner = _runner(path)
    graphs = _graphs(runner)
    ours, theirs = run(runner), run(_runner(path))
    assert [len(logits) for logits in ours] == [3, 1, 0]
    assert _close(ours[0], theirs[0])
    assert _close(ours[1], theirs[1])
    assert graphs.num_misses == 0


def _generate(runner: ModelRunner, orders: list[list[int]]) -> list[list[int | None]]:
    return PagedHarness(runner).generate_ahead([[3, 1, 4, 1, 5], [9]], orders)


def test_tokens_that_only_the_device_knows(path: Path) -> None:
    orders = [[0, 1], [1, 0], [1, 0], [0], [0]]
    runner = _runner(path)
    graphs = _graphs(runner)
    ours = _generate(runner, orders)
    assert ours == _generate(_runner(path), orders)
    assert graphs.num_misses == 0


def test_decodes_look_for_the_largest_logit_in_their_graph(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a temperature or without; a row whose logits are NaN has none that counts."""

    def run(runner: ModelRunner) -> list[SampledToken | None]:
        harness = PagedHarness(runner)
        sequences = [PagedSequence() for _ in range(3)]
        for index, sequence in enumerate(sequences):
            harness.fill(sequence, [7 + index] * (5 + index), chunk=9)
        runner.kv_cache[:, :, sequences[1].block_table] = float("nan")
        with monkeypatch.context() as patch:
            if runner._graphs is not None:
                patch.delattr(sampler, "_find_largest")
            rows = [harness.row(sequence, [4]) for sequence in sequences]
            drawn = SamplingRow(SamplingParams(temperature=0.7), [], [], 3, frozenset())
            sampling = [greedy_row(), greedy_row(), drawn]
            outcomes = runner.launch(StepBatch(rows, sampling=sampling)).outcome()
        return [outcome.token for outcome in outcomes]

    runner = _runner(path)
    _graphs(runner)
    tokens = run(runner)
    assert tokens == run(_runner(path))
    assert [token is not None and token.token_id is not None for token in tokens] == [
        True,
        False,
        True,
    ]


def test_all_graphs_are_captured_once_the_largest_first(path: Path) -> None:
    runner = _runner(path)
    capture = Repeat()
    # The least that has graphs with all combinations of parts.
    graphs = _graphs(runner, capture, max_tokens=16)
    assert {key.parts for key in graphs.keys} >= {Parts(False, True), Parts(True, True)}
    seen: list[tuple[int, int]] = []
    graphs.capture_all(lambda done, total: seen.append((done, total)))
    assert capture.captured == len(graphs.keys) == len(seen)
    assert seen[-1] == (len(graphs.keys), len(graphs.keys))
    assert next(iter(graphs._graphs)) == graphs.keys[-1]
    graphs.capture_all()
    PagedHarness(runner).generate([[1, 2, 3]], 3)
    assert capture.captured == len(graphs.keys)


def test_no_memory_for_a_graph_leaves_its_steps_without(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        raise torch.cuda.OutOfMemoryError("none left")

    runner = _runner(path)
    graphs = runner.use_graphs(refuse, max_rows=4, max_context=200, max_tokens=8)
    assert graphs is not None
    graphs.capture_all()
    tokens, _ = PagedHarness(runner).generate([[1, 2, 3]], 3)
    assert tokens == PagedHarness(_runner(path)).generate([[1, 2, 3]], 3)[0]
    assert graphs.num_replays == 0
    assert "no memory" in caplog.text


def test_graphs_are_captured_one_by_one_the_largest_first(path: Path) -> None:
    runner = _runner(path)
    repeat = Repeat()
    graphs = _graphs(runner, repeat)
    # Only where the settings say so.
    assert not runner.prepare()
    assert repeat.captured == 0
    graphs.ahead = True
    tokens, _ = PagedHarness(runner).generate([[1, 2, 3]], 3)
    needed = repeat.captured
    assert 0 < needed < len(graphs.keys)
    while runner.prepare():
        pass
    assert repeat.captured == len(graphs.keys)
    assert PagedHarness(runner).generate([[1, 2, 3]], 3)[0] == tokens
    assert (repeat.captured, graphs.num_misses) == (len(graphs.keys), 0)


def test_no_graphs_without_triton(path: Path) -> None:
    settings = BuiltinSettings(device="cpu", dtype="float32", num_blocks=8)
    runner = load_runner(path, settings)
    assert runner.use_graphs(Repeat(), max_rows=4, max_context=100, max_tokens=8) is None


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 64, 100, 256, 300, 2048])
def test_every_step_up_to_the_limit_has_a_graph(path: Path, max_tokens: int) -> None:
    attention = _runner(path)._attention
    assert isinstance(attention, TritonAttention)
    keys = graph_keys(max_tokens, attention)
    assert keys == sorted(set(keys))
    largest = {
        parts: max((k.num_tokens for k in keys if k.parts == parts), default=0)
        for parts in {key.parts for key in keys}
    }
    assert largest[Parts(False, False)] == min(max_tokens, 256)
    for parts, least in ((Parts(False, True), 16), (Parts(True, True), 9)):
        if max_tokens >= least:
            assert largest[parts] >= min(max_tokens, 256)
        else:
            assert parts not in largest
    assert all(isinstance(key, Key) for key in keys)
