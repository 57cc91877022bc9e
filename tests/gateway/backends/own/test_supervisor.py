"""The gateway's own engine processes, with real processes that hold no model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.gateway import scripted_worker
from harness.gateway.linked import KEY, WAIT_S, join_server, joined
from harness.gateway.scripted_worker import EMPTY_TOKENIZER, scripted_info
from harness.processes import is_alive
from harness.waiting import until
from parrot_engine.link.wire import Register
from parrot_engine.protocol import EngineStats
from parrot_engine.text import TextAssets

from parrot_gateway.backends.own import supervisor as supervisor_module
from parrot_gateway.backends.own.registry import EngineRegistry
from parrot_gateway.backends.own.supervisor import EngineProcess, EngineSupervisor, worker_command
from parrot_gateway.settings.model import ModelSettings


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervisor_module, "_STOP_TIMEOUT_S", 0.3)


def scripted(*behaviour: str) -> Callable[[ModelSettings, str, str], list[str]]:
    def command(model: ModelSettings, url: str, name: str) -> list[str]:
        return [
            sys.executable, scripted_worker.__file__, *behaviour,
            *("--model", model.served_name, "--join", url, "--engine-name", name),
        ]  # fmt: skip

    return command


@asynccontextmanager
async def supervised(
    *behaviour: str, engines: int = 1, **options: Any
) -> AsyncIterator[tuple[EngineSupervisor, EngineRegistry]]:
    registry = EngineRegistry(max_engines=8)
    async with join_server(registry) as url:
        supervisor = EngineSupervisor(
            [ModelSettings(model="scripted", engines=engines)],
            registry,
            command=scripted(*behaviour),
            **options,
        )
        await supervisor.start(url, KEY)
        try:
            yield supervisor, registry
        finally:
            async with asyncio.timeout(WAIT_S):
                await supervisor.close()


def pids(supervisor: EngineSupervisor) -> list[int]:
    found = [process.pid for process in supervisor.processes]
    assert all(found)
    return [pid for pid in found if pid is not None]


async def settled(supervisor: EngineSupervisor) -> None:
    async with asyncio.timeout(WAIT_S):
        await supervisor.wait_ready()


async def test_processes_come_up_and_go_down() -> None:
    async with supervised("serve", engines=2) as (supervisor, registry):
        assert supervisor.models() == ["scripted"]
        assert supervisor.state("scripted") == "loading"
        assert supervisor.state("other") is None
        await settled(supervisor)
        assert supervisor.state("scripted") == "ready"
        assert supervisor.failure("scripted") is None
        assert len(registry.serving["scripted"]) == 2
        running = pids(supervisor)
        assert all(map(is_alive, running))
        described = supervisor.describe()
        assert [item["state"] for item in described] == ["ready", "ready"]
        assert [item["name"] for item in described] == ["scripted-0", "scripted-1"]
        assert KEY not in str(described)
    assert not any(map(is_alive, running))


def test_no_name_is_given_out_twice() -> None:
    model = ModelSettings(model="scripted")
    supervisor = EngineSupervisor([model], EngineRegistry(max_engines=8))
    assert supervisor.owns("scripted-0")
    supervisor.remove("scripted")
    supervisor.add(model)
    assert [process.name for process in supervisor.processes] == ["scripted-1"]
    assert not supervisor.owns("scripted-0")


async def test_a_killed_process_is_started_again() -> None:
    async with supervised("serve") as (supervisor, registry):
        await settled(supervisor)
        first = await joined(registry)
        os.kill(pids(supervisor)[0], signal.SIGKILL)
        await until(lambda: first.lost)
        await joined(registry)
        await until(lambda: supervisor.state("scripted") == "ready")
        assert supervisor.processes[0].restarts == 1
        assert (await joined(registry)).id != first.id


async def test_a_process_that_dies_at_once_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async with supervised("crash", "3") as (supervisor, _):
        await settled(supervisor)
        assert supervisor.state("scripted") == "failed"
        reason = supervisor.failure("scripted")
        assert reason is not None
        assert "3 times" in reason
        assert "status 3" in reason
        assert reason.endswith(": first line\nlast line")
        assert supervisor.processes[0].restarts == 2
    pauses = [r.message.partition("again in ")[2] for r in caplog.records if "again" in r.message]
    assert pauses == ["0.01 s", "0.02 s"]


async def test_a_useless_try_is_not_repeated() -> None:
    async with supervised("crash", "78") as (supervisor, _):
        await settled(supervisor)
        assert supervisor.failure("scripted") == "last line"
        assert supervisor.processes[0].restarts == 0


async def test_a_refusal_of_several_lines_is_told_whole() -> None:
    async with supervised("refuse", "no tokenizer in /m:\ninstall this\nor that") as (
        supervisor,
        _,
    ):
        await settled(supervisor)
        assert supervisor.failure("scripted") == "no tokenizer in /m: install this or that"


async def test_a_line_that_is_too_long_is_left_out() -> None:
    async with supervised("refuse", "bad file:\n" + 20_000 * "x" + "\nthat one") as (supervisor, _):
        await settled(supervisor)
        reason = supervisor.failure("scripted")
        assert reason is not None
        assert reason.startswith("bad file:")
        assert reason.endswith(" that one")
        assert len(reason) < 20_000


async def test_one_bad_start_is_forgiven(tmp_path: Path) -> None:
    async with supervised("flaky", str(tmp_path / "marker")) as (supervisor, _):
        await settled(supervisor)
        assert supervisor.state("scripted") == "ready"
        assert supervisor.processes[0].restarts == 1


class Stub:
    """Processes that only sleep, or what a test gives; a test lets them join and die."""

    def __init__(self, *command: str, engines: int = 1) -> None:
        self.registry = EngineRegistry(max_engines=8)
        self.supervisor = EngineSupervisor(
            [ModelSettings(model="scripted", engines=engines)],
            self.registry,
            command=lambda *_: list(command or ("sleep", "1000")),
        )

    async def __aenter__(self) -> Stub:
        await self.supervisor.start("ws://127.0.0.1:1/", KEY)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.close()

    def join(self, process: EngineProcess) -> str:
        """Let the process join; the engine's id."""
        info, text = scripted_info("scripted"), TextAssets(EMPTY_TOKENIZER)
        return self.registry.add(Register(process.name, info, text)).id

    async def die(self, process: EngineProcess, engine_id: str | None = None) -> None:
        """Let it die; returns when it was started again or given up."""
        await until(lambda: process.pid is not None)
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        if engine_id is not None:
            self.registry.remove(engine_id, "it died")
        await until(lambda: process.state == "failed" or process.pid not in (None, pid))


@pytest.mark.parametrize("worked_for_a_while", [True, False])
async def test_only_deaths_in_a_row_count(
    monkeypatch: pytest.MonkeyPatch, worked_for_a_while: bool
) -> None:
    monkeypatch.setattr(supervisor_module, "_FORGIVEN_AFTER_S", 0.0 if worked_for_a_while else 1e9)
    async with Stub() as stub:
        (process,) = stub.supervisor.processes
        for _ in range(3):
            engine_id = stub.join(process)
            assert process.state == "ready"
            await stub.die(process, engine_id)
        assert process.restarts == (3 if worked_for_a_while else 2)
        assert process.state == ("loading" if worked_for_a_while else "failed")


@pytest.mark.parametrize("link_breaks_first", [True, False])
async def test_an_engine_that_computes_is_never_given_up(link_breaks_first: bool) -> None:
    async with Stub() as stub:
        (process,) = stub.supervisor.processes
        for _ in range(4):
            engine_id = stub.join(process)
            stub.registry.joined[engine_id].note_stats(EngineStats(filled_tokens=9))
            await stub.die(process, engine_id if link_breaks_first else None)
            stub.registry.remove(engine_id, "it died")
        assert process.state == "loading"
        assert process.deaths == 1


async def test_having_worked_once_forgives_no_later_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FORGIVEN_AFTER_S", 0.0)
    async with Stub() as stub:
        (process,) = stub.supervisor.processes
        await stub.die(process, stub.join(process))
        for _ in range(2):
            assert process.state == "loading"
            await stub.die(process)
        assert process.state == "failed"


async def test_a_model_is_as_ready_as_its_best_process() -> None:
    async with Stub(engines=2) as stub:
        supervisor = stub.supervisor
        one, other = supervisor.processes
        stub.join(other)
        assert [process.state for process in (one, other)] == ["loading", "ready"]
        assert supervisor.state("scripted") == "ready"
        for _ in range(3):
            await stub.die(one)
        assert (one.state, supervisor.state("scripted")) == ("failed", "ready")
        assert supervisor.failure("scripted") is None


async def test_of_a_line_that_is_redrawn_the_last_state_is_told() -> None:
    async with Stub("sh", "-c", r"printf '10%%\r50%%\rloaded half\n' >&2; exit 78") as stub:
        await settled(stub.supervisor)
        assert stub.supervisor.failure("scripted") == "loaded half"


async def test_after_its_end_it_hears_of_no_engine() -> None:
    async with Stub() as stub:
        (process,) = stub.supervisor.processes
    stub.join(process)
    assert process.state == "loading"


async def test_who_was_given_up_does_not_count_when_it_joins_late() -> None:
    async with Stub("false") as stub:
        (process,) = stub.supervisor.processes
        await settled(stub.supervisor)
        stub.join(process)
        assert (process.state, stub.supervisor.state("scripted")) == ("failed", "failed")


async def test_a_process_that_does_not_join_in_time_is_ended() -> None:
    async with supervised("deaf", load_timeout_s=0.5) as (supervisor, _):
        await settled(supervisor)
        reason = supervisor.failure("scripted")
        assert reason is not None
        assert "load_timeout_s" in reason
        await until(lambda: supervisor.processes[0].pid is None)
        assert supervisor.state("scripted") == "failed"
        assert supervisor.processes[0].restarts == 0


async def test_a_process_that_hears_no_signal_is_killed() -> None:
    async with supervised("deaf") as (supervisor, _):
        process = supervisor.processes[0]
        # It has spoken, so it has got as far as ignoring SIGTERM, or nearly.
        await until(lambda: len(process.last_lines) == 2)
        (pid,) = pids(supervisor)
    assert not is_alive(pid)


async def test_a_program_that_is_not_there_fails() -> None:
    registry = EngineRegistry(max_engines=8)
    supervisor = EngineSupervisor(
        [ModelSettings(model="scripted")], registry, command=lambda *_: ["/no/such/program"]
    )
    await supervisor.start("ws://127.0.0.1:1/", KEY)
    await settled(supervisor)
    assert "could not be started" in str(supervisor.failure("scripted"))
    await supervisor.close()


async def test_without_models_there_is_nothing_to_wait_for() -> None:
    supervisor = EngineSupervisor([], EngineRegistry(max_engines=8))
    await supervisor.start("ws://127.0.0.1:1/", KEY)
    await settled(supervisor)
    assert supervisor.models() == []
    await supervisor.close()


def test_the_workers_command_line_holds_the_options_and_no_secret() -> None:
    from parrot_engine.loading.factory import EngineOptions
    from parrot_engine.server.command import _options, _parser

    model = ModelSettings(
        model="owner/model",
        name="served",
        kind="huggingface",
        num_blocks=7,
        kv_cache_bytes=10**9,
        seed=5,
        trust_remote_code=True,
    )
    command = worker_command(model, "ws://host/join", "served-0")
    assert command[:3] == [sys.executable, "-m", "parrot_engine"]
    parsed = _parser().parse_args(command[3:])
    assert parsed.join == "ws://host/join"
    assert parsed.engine_name == "served-0"
    options = _options(parsed)
    assert isinstance(options, EngineOptions)
    assert (options.model, options.name, options.kind) == ("owner/model", "served", "huggingface")
    assert (options.num_blocks, options.kv_cache_bytes, options.seed) == (7, 10**9, 5)
    assert options.trust_remote_code is True


def test_adapters_on_the_command_lines_of_workers_and_of_engines() -> None:
    from parrot_engine.server.command import _options, _parser

    model = ModelSettings(model="m", adapters={"a": "/x", "b": "/y"}, adapter_folders=["/z"])
    command = worker_command(model, "ws://host/join", "served-0")
    typed = ["--model", "m", "--join", "ws://host/join", "--lora", "a=/x", "--lora", "b=/y"]
    for arguments in (command[3:], [*typed, "--adapter-folder", "/z"]):
        options = _options(_parser().parse_args(arguments))
        assert options.adapters == {"a": "/x", "b": "/y"}
        assert options.adapter_folders == ["/z"]
    with pytest.raises(SystemExit):
        _parser().parse_args([*typed, "--lora", "=/x"])


def test_engines_of_a_model_take_its_devices_in_turn() -> None:
    model = ModelSettings(model="owner/model", engines=3, device="cuda:0, cuda:1")
    supervisor = EngineSupervisor(
        [model, ModelSettings(model="other")], EngineRegistry(max_engines=8)
    )
    devices = [process.model.device for process in supervisor.processes]
    assert devices == ["cuda:0", "cuda:1", "cuda:0", "auto"]


SECRETS = {
    "OPENAI_API_KEY": "s1",
    "PARROT_API_KEY": "s2",
    "HF_SOMETHING_API_KEY": "s3",
    "AWS_SECRET_ACCESS_KEY": "s4",
    "MY_GATEWAY_KEY": "s5",
    "PARROT_ENGINE_KEY": "s6",
    "DATABASE_URL": "s7",
}
PASSED_ON = {
    "HF_HOME": "/cache",
    "HF_TOKEN": "hub",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "3",
    "LC_ALL": "C.UTF-8",
    "HTTPS_PROXY": "http://proxy",
    "no_proxy": "localhost",
    "TORCHINDUCTOR_CACHE_DIR": "/inductor",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "SSL_CERT_FILE": "/ca.pem",
}


async def test_engine_processes_get_no_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in {**SECRETS, **PASSED_ON}.items():
        monkeypatch.setenv(name, text)
    path = tmp_path / "environment"
    async with supervised("tell", str(path)) as (supervisor, _):
        await settled(supervisor)
    seen = json.loads(path.read_text(encoding="utf-8"))
    assert {name: seen.get(name) for name in PASSED_ON} == PASSED_ON
    assert not SECRETS.keys() & seen.keys()
    assert not set(SECRETS.values()) & set(seen.values())
    assert seen["PATH"] == os.environ["PATH"]
    # It could join.
    assert seen["PARROT_JOIN_KEY"] == KEY


async def test_a_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "REJOIN_TIMEOUT_S", 0.2)
    async with supervised("serve") as (supervisor, registry):
        await settled(supervisor)
        first = await joined(registry)
        (hung,) = pids(supervisor)
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: first.lost)
        await joined(registry)
        await until(lambda: supervisor.state("scripted") == "ready")
        assert pids(supervisor) != [hung]
        assert supervisor.processes[0].restarts == 1


async def test_a_process_that_computes_nothing_is_killed_at_once() -> None:
    async with supervised("serve") as (supervisor, registry):
        await settled(supervisor)
        first = await joined(registry)
        (stalled,) = pids(supervisor)
        # It cannot come back by itself.
        os.kill(stalled, signal.SIGSTOP)
        registry.remove(first.id, "it had work and ran no step", "stalled")
        await joined(registry)
        assert pids(supervisor) != [stalled]
        assert supervisor.processes[0].restarts == 1


async def test_a_process_whose_link_breaks_may_come_back() -> None:
    async with supervised("serve") as (supervisor, registry):
        await settled(supervisor)
        for _ in range(2):
            engine = await joined(registry)
            (pid,) = pids(supervisor)
            os.kill(pid, signal.SIGSTOP)
            await until(lambda lost=engine: lost.lost)
            os.kill(pid, signal.SIGCONT)
            await joined(registry)
            assert pids(supervisor) == [pid]
        assert supervisor.processes[0].restarts == 0


async def test_an_old_link_that_ends_late_says_nothing_of_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "REJOIN_TIMEOUT_S", 0.1)
    async with supervised("serve") as (supervisor, registry):
        await settled(supervisor)
        engine = await joined(registry)
        old = registry.add(Register(engine.name, engine.info, engine.text), engine.tokenizer)
        registry.remove(old.id, "noticed late")
        assert supervisor.state("scripted") == "ready"
        # The clock: somebody who waits for longer than a process may be away.
        with pytest.raises(TimeoutError):
            await until(lambda: "another" in registry.serving, 0.3)
        assert registry.serving["scripted"] == [engine]
        assert supervisor.processes[0].restarts == 0
