"""A model over several processes says what it says in one; a lost process ends the engine."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine_checks import greedy, run_until_idle, tokens_of
from harness.lora_folders import ALL, make_adapter
from harness.processes import is_alive
from parrot_engine.batch import RowOutcome
from parrot_engine.distributed import leader as leader_module
from parrot_engine.distributed import worker_group
from parrot_engine.distributed.leader import LeaderRunner, RankGroup
from parrot_engine.distributed.worker_group import wait_for
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.engine.driver import EngineDriver
from parrot_engine.exceptions import AdapterError, CheckpointError, SettingsError, ShardError
from parrot_engine.protocol import Event, Fill, FreeContext, Generate, Generated, SamplingParams
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings

PROMPT = [(7 * index + 3) % 250 for index in range(50)]


def settings(**changes: Any) -> BuiltinSettings:
    given = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "block_size": 8, "seed": 5}
    # Several steps for a prompt, and the next one launched before a token is known.
    return BuiltinSettings(**{"max_batch_tokens": 24, "overlap": "on", **given, **changes})


def open_engine(folder: Path, **changes: Any) -> BuiltinEngine:
    return BuiltinEngine.load(folder, settings(**changes), model="m")


def runner_of(engine: BuiltinEngine) -> ModelRunner:
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    return runner


def group_of(engine: BuiltinEngine) -> RankGroup:
    runner = runner_of(engine)
    assert isinstance(runner, LeaderRunner)
    assert runner.group is not None
    return runner.group


def pids_of(engine: BuiltinEngine) -> list[int]:
    return group_of(engine).workers.pids


def conversation(engine: BuiltinEngine) -> list[list[int]]:
    """Prompts, a fork, a prefix found again, sampling, penalties, scores."""
    scored = SamplingParams(6, temperature=0, ignore_eos=True, logprobs=2)
    drawn = SamplingParams(9, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
    events: list[Event] = run_until_idle(
        engine,
        Fill(1, PROMPT),
        Generate(1, greedy(12)),
        Fill(2, PROMPT[:20]),
        Generate(2, drawn),
        Fill(3, [9, 8, 7], parent_context_id=1),
        Generate(3, greedy(7, repetition_penalty=1.3)),
    )
    events += run_until_idle(
        engine,
        FreeContext(2),
        Fill(4, [*PROMPT[:40], 1, 2]),
        Generate(4, scored),
        Fill(5, [4], parent_context_id=3),
        Generate(5, greedy(5)),
    )
    said = [tokens_of(events, context_id) for context_id in range(1, 6)]
    assert [len(tokens) for tokens in said] == [12, 9, 7, 6, 5]
    return said


def served(engine: BuiltinEngine, name: str, folder: Path) -> str:
    """Serve an adapter, as is done while steps go on; its id."""
    read = engine.read_adapter(name, str(folder))
    engine.add_adapter(read)
    return read.adapter.id


def with_adapters(engine: BuiltinEngine, folders: Sequence[Path]) -> list[list[int]]:
    """More adapters than a step may have beside the base, forks, and one that comes back."""
    if not folders:
        return []
    ids = [served(engine, folder.name, folder) for folder in folders]
    events = run_until_idle(
        engine,
        *(Fill(10 + number, PROMPT, adapter=name) for number, name in enumerate(["", *ids])),
        *(Generate(10 + number, greedy(8)) for number in range(1 + len(ids))),
        Fill(20, [5, 6, 7], parent_context_id=12),
        Generate(20, greedy(5)),
    )
    engine.remove_adapter(folders[0].name)
    events += run_until_idle(engine, Fill(21, [8], parent_context_id=11), Generate(21, greedy(4)))
    events += run_until_idle(engine, FreeContext(11), FreeContext(21), Fill(22, [9, 9]))
    again = served(engine, "again", folders[0])
    assert again == ids[0]
    events += run_until_idle(engine, Fill(23, PROMPT, adapter=again), Generate(23, greedy(8)))
    said = {number: tokens_of(events, number) for number in (10, 11, 12, 13, 20, 21, 23)}
    assert said[23] == said[11]
    assert len({tuple(said[number]) for number in range(10, 14)}) == 4
    return list(said.values())


def make_adapters(base: Path, folder: Path) -> list[Path]:
    """Three adapters of a checkpoint: of all products, or of attention where experts are."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj") if "moe" in base.name else ALL
    return [
        make_adapter(folder / str(rank), base, targets=targets, rank=rank) for rank in (4, 8, 3)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints: with KV heads that are divided, and with one that both ranks hold."""
    folder = tmp_path_factory.mktemp("ranks")
    configs = {name: CONFIGS[name] for name in ("llama", "qwen2", "llama-biases-mha", "qwen3-moe")}
    qwen3 = CONFIGS["qwen3"]
    configs["qwen3-one-kv-head"] = type(qwen3).from_dict(
        {**qwen3.to_dict(), "num_key_value_heads": 1}
    )
    return {name: make_checkpoint(folder / name, config) for name, config in configs.items()}


@pytest.mark.parametrize(
    ("name", "max_loras"),
    [
        ("llama", 0),
        ("qwen2", 0),
        ("llama-biases-mha", 2),
        ("qwen3-one-kv-head", 2),
        ("qwen3-moe", 2),
    ],
)
def test_two_ranks_say_what_one_says(
    folders: dict[str, Path], name: str, max_loras: int, tmp_path: Path
) -> None:
    paths = make_adapters(folders[name], tmp_path) if max_loras else []
    alone = open_engine(folders[name], max_loras=max_loras)
    expected = conversation(alone), with_adapters(alone, paths)
    kv_bytes = runner_of(alone).kv_bytes_per_block
    engine = open_engine(folders[name], tensor_parallel=2, max_loras=max_loras)
    try:
        pids = pids_of(engine)
        assert (conversation(engine), with_adapters(engine, paths)) == expected
        assert engine.info.num_blocks == 64
        # One KV head cannot be divided: both have it.
        of_rank = kv_bytes if name == "qwen3-one-kv-head" else kv_bytes // 2
        assert runner_of(engine).kv_bytes_per_block == of_rank
    finally:
        engine.close()
    assert len(pids) == 1
    assert not any(map(is_alive, pids))


def refuses_adapters(engine: BuiltinEngine, good: Path) -> None:
    """An adapter that one rank cannot read is served by none."""
    workers, nothing = group_of(engine).workers, str(good / "nothing")
    with pytest.raises(AdapterError, match=r"bad: .*nothing is no folder"):
        engine.read_adapter("bad", nothing)
    with pytest.raises(AdapterError, match=r"^rank 1: .*nothing is no folder"):
        workers.read_adapter(nothing, "id")
    with pytest.raises(AdapterError, match="rank 1: its files changed while they were read"):
        workers.read_adapter(str(good), "id of other weights")


def test_ranks_with_whole_experts_say_what_one_says(folders: dict[str, Path]) -> None:
    said = []
    for ranks in ({}, {"tensor_parallel": 2, "enable_expert_parallel": True}):
        engine = open_engine(folders["qwen3-moe"], **ranks)
        try:
            said.append(conversation(engine))
        finally:
            engine.close()
    assert said[0] == said[1]
    with pytest.raises(SettingsError, match="no mixtures of experts"):
        open_engine(folders["llama"], tensor_parallel=2, enable_expert_parallel=True)


def test_dummy_weights_are_the_same_for_any_number_of_ranks(folders: dict[str, Path]) -> None:
    said = []
    for size in (1, 2):
        engine = open_engine(folders["llama"], tensor_parallel=size, dummy_weights=True)
        try:
            said.append(conversation(engine))
        finally:
            engine.close()
    assert said[0] == said[1]


def test_a_lost_rank_ends_the_engine(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = open_engine(folders["llama"], tensor_parallel=2, max_loras=1)
    adapter = make_adapter(tmp_path / "adapter", folders["llama"])
    try:
        refuses_adapters(engine, adapter)
        engine.submit([Fill(1, PROMPT), Generate(1, greedy(100))])
        while not any(isinstance(event, Generated) for event in engine.step().events):
            pass
        (pid,) = pids_of(engine)
        os.kill(pid, signal.SIGKILL)
        # The steps under way may still come about; there are a hundred to go.
        with pytest.raises(ShardError, match="rank 1 of the engine was lost: ended by SIGKILL"):
            run_until_idle(engine)
        with pytest.raises(ShardError, match="SIGKILL"):
            engine.step()
        with pytest.raises(AdapterError, match="rank 1 of the engine was lost"):
            engine.read_adapter("late", str(adapter))
    finally:
        engine.close()
    assert not is_alive(pid)
    # Nothing is left of it in this process.
    again = open_engine(folders["llama"], tensor_parallel=2)
    again.close()


class FaultyLaunch:
    """A step that the device gave up, as when memory of a lost rank is gone."""

    def sample(self) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    def ready(self) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    def outcome(self) -> list[RowOutcome]:
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_what_fails_on_the_device_because_a_rank_is_lost_says_so(folders: dict[str, Path]) -> None:
    engine = open_engine(folders["llama"], tensor_parallel=2)
    try:
        workers = group_of(engine).workers
        step = workers.watch(FaultyLaunch())
        (pid,) = workers.pids
        os.kill(pid, signal.SIGKILL)
        assert step.ready()
        with pytest.raises(ShardError, match="rank 1 of the engine was lost: ended by SIGKILL"):
            step.outcome()
    finally:
        engine.close()


def test_closing_waits_for_no_gpu_that_waits_for_a_lost_rank(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its graphs nor its group are taken down, and the process will not clean up either."""
    engine = open_engine(folders["llama"], tensor_parallel=2)
    model = runner_of(engine)
    collective = group_of(engine)._collective
    assert collective is not None
    at_exit: list[object] = []
    took_down: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(worker_group, "atexit", SimpleNamespace(register=at_exit.append))
        patch.setattr(worker_group.WorkerGroup, "is_stuck", True)
        patch.setattr(collective, "leave", lambda: took_down.append("group"))
        patch.setattr(model, "forget_graphs", lambda: took_down.append("graphs"))
        try:
            engine.close()
            assert took_down == []
            assert set(at_exit) == {worker_group._end_at_once}
            assert model in leader_module._STUCK
        finally:
            leader_module._STUCK.clear()
    collective.leave()


def test_the_loss_of_a_rank_is_noticed_with_nothing_to_do(folders: dict[str, Path]) -> None:
    crashes: queue.Queue[Exception] = queue.Queue()
    engine = open_engine(folders["llama"], tensor_parallel=2)
    driver = EngineDriver(engine, on_crash=crashes.put)
    (pid,) = pids_of(engine)
    driver.start()
    try:
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ShardError, match="SIGKILL"):
            raise crashes.get(timeout=60)
        assert driver.crashed
    finally:
        driver.close()
    assert not is_alive(pid)


#: An engine of two ranks that says who the other is, and then does nothing.
_LEADER = """
import sys
from pathlib import Path
from parrot_engine.settings import BuiltinSettings
from parrot_engine.distributed.leader import load_leader_runner

settings = BuiltinSettings(device="cpu", num_blocks=8, tensor_parallel=2)
runner = load_leader_runner(Path(sys.argv[1]), settings)
print(*runner.group.workers.pids, flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_the_first(folders: dict[str, Path]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _LEADER, str(folders["llama"])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as leader:
        assert leader.stdout is not None
        end = os.pidfd_open(int(leader.stdout.readline()))
        try:
            leader.kill()
            readable, _, _ = select.select([end], [], [], 60)
            assert readable == [end]
        finally:
            os.close(end)


def test_a_step_is_waited_for_as_long_as_ranks_live_and_no_longer_than_allowed() -> None:
    looks = iter([False, False, True])
    wait_for(lambda: next(looks), lambda: None)

    def check() -> None:
        raise ShardError("rank 1 is lost")

    with pytest.raises(ShardError, match="rank 1 is lost"):
        wait_for(lambda: False, check)
    with pytest.raises(ShardError, match="not over"):
        wait_for(lambda: False, lambda: None, timeout_s=0)


def test_a_rank_that_cannot_load_says_why(folders: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folders["llama"].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    # Read by all, refused by all: whoever is first says so.
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises((ShardError, CheckpointError), match=r"model\.safetensors"):
        open_engine(broken, tensor_parallel=2)


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        (3, "4 attention heads cannot be divided by 3; this model can take 1, 2, 4"),
        (8, "4 attention heads cannot be divided by 8"),
        (0, "must be at least 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    folders: dict[str, Path], size: int, problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem) as caught:
        open_engine(folders["llama"], tensor_parallel=size)
    assert caught.value.setting == "tensor_parallel"
