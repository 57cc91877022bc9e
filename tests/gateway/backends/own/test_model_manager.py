"""Models loaded and unloaded at run time, with processes that only sleep and join by hand."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from harness.gateway.linked import KEY
from harness.gateway.scripted_worker import EMPTY_TOKENIZER, scripted_info
from harness.waiting import until
from parrot_engine.link.wire import Register
from parrot_engine.text import TextAssets

from parrot_gateway.backends.own import registry as registry_module
from parrot_gateway.backends.own import supervisor as supervisor_module
from parrot_gateway.backends.own.downloads import Downloads
from parrot_gateway.backends.own.model_manager import ModelManager
from parrot_gateway.backends.own.registry import EngineRegistry
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.backends.own.supervisor import EngineSupervisor
from parrot_gateway.exceptions import (
    ConflictError,
    GatewayError,
    HubError,
    ModelLoadError,
    ModelLoadingError,
    ModelNotFoundError,
    OverloadedError,
)
from parrot_gateway.settings.model import EngineLinkSettings, ModelSettings

#: What a download writes, by the name of its repository.
PULLS = {
    "here/it-is": '{"total_bytes": 10, "files": 1}\n{"done_bytes": 10}\n{"path": "/cache"}',
    "not/there": '{"failure": "model_gated", "message": "accept the terms"}',
}


class Models:
    """A manager of models whose engines the test lets join."""

    def __init__(self, *models: ModelSettings, **settings: Any) -> None:
        self.registry = EngineRegistry(max_engines=16)
        self.commands: list[ModelSettings] = []
        self.supervisor = EngineSupervisor(models, self.registry, command=self.command)
        self.waiting: dict[str, int] = {}
        self.refused: list[GatewayError] = []
        self.last_used: dict[str, float] = {}
        self.manager = ModelManager(
            models,
            EngineLinkSettings(**settings),
            self.registry,
            self.supervisor,
            Downloads(1, 100, command=self.pull_command),
            last_used=self.last_used,
            reserved=lambda: ["an-alias"],
            waiting=lambda model: self.waiting.get(model, 0),
            refuse_waiting=lambda model, error: self.refused.append(error),
        )

    def command(self, model: ModelSettings, url: str, name: str) -> list[str]:
        if model.model == "broken":
            return ["sh", "-c", "echo 'error: architecture Foo is unknown' >&2; exit 78"]
        return ["sleep", "1000"]

    def pull_command(self, model: str, max_bytes: int) -> list[str]:
        script = f"import time\nprint({PULLS.get(model)!r} or time.sleep(1000), flush=True)"
        return [sys.executable, "-S", "-c", script]

    async def __aenter__(self) -> Models:
        await self.supervisor.start("ws://127.0.0.1:1/", KEY)
        self.manager.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.close()
        await self.supervisor.close()

    async def join(self, model: str) -> RemoteEngine:
        """Let the engine of a model join, once its process was started."""
        await until(
            lambda: [
                process
                for process in self.supervisor.processes_of(model)
                if process.state == "loading" and process.pid is not None
            ]
        )
        (process,) = self.supervisor.processes_of(model)
        info, text = scripted_info(model), TextAssets(EMPTY_TOKENIZER)
        return self.registry.add(Register(process.name, info, text))

    def load(self, name: str, **settings: Any) -> asyncio.Task[None]:
        return self.manager.load(ModelSettings(model=name, **settings), from_hub=False)

    async def load_ready(self, name: str, **settings: Any) -> RemoteEngine:
        work = self.load(name, **settings)
        engine = await self.join(name)
        await work
        return engine

    def state(self, name: str) -> str:
        return str(self.manager.find(name)["state"])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervisor_module, "_STOP_TIMEOUT_S", 0.3)


@pytest_asyncio.fixture
async def models() -> AsyncIterator[Models]:
    async with Models(ModelSettings(model="first")) as models:
        await models.join("first")
        yield models


async def test_a_model_is_loaded_described_and_unloaded(models: Models) -> None:
    work = models.load("second", num_blocks=7)
    assert models.supervisor.models() == ["first", "second"]
    assert models.state("second") == "loading"
    engine = await models.join("second")
    await work
    found = models.manager.find("second")
    assert (found["state"], found["settings"]) == ("ready", {"num_blocks": 7})
    (described,) = found["engines"]
    assert (described["name"], described["device"]) == (engine.name, "cpu")
    assert described["memory"]["kv_blocks"] == engine.info.num_blocks
    assert await models.manager.unload("second") == 0
    assert engine.lost
    assert models.supervisor.models() == ["first"]
    with pytest.raises(ModelNotFoundError):
        models.manager.find("second")


async def test_a_model_of_the_settings_can_be_loaded_again(models: Models) -> None:
    await models.manager.unload("first")
    assert models.state("first") == "unloaded"
    await models.load_ready("first")
    assert models.state("first") == "ready"


async def test_what_cannot_be_loaded_is_refused_and_harms_no_other(models: Models) -> None:
    with pytest.raises(ModelLoadError, match="architecture Foo is unknown"):
        await models.load("broken")
    found = models.manager.find("broken")
    assert (found["state"], found["code"]) == ("failed", "model_load_failed")
    assert models.supervisor.models() == ["first"]
    assert models.state("first") == "ready"
    # It may be tried again, and forgotten.
    with pytest.raises(ModelLoadError):
        await models.load("broken")
    assert await models.manager.unload("broken") == 0
    with pytest.raises(ModelNotFoundError):
        models.manager.find("broken")


@pytest.mark.parametrize(
    ("name", "settings", "code"),
    [
        ("first", {}, "model_already_loaded"),
        ("an-alias", {}, "model_name_taken"),
        ("big", {"memory_share": 0.5}, "memory_share_exceeded"),
        ("twice", {"memory_share": 0.3, "engines": 2}, "memory_share_exceeded"),
        ("third", {}, "too_many_models"),
    ],
)
async def test_refusals(name: str, settings: dict[str, Any], code: str) -> None:
    shared = ModelSettings(model="first", memory_share=0.6, device="cpu")
    limit = 1 if code == "too_many_models" else 8
    async with Models(shared, max_models=limit) as models:
        with pytest.raises(ConflictError) as caught:
            models.load(name, **{"device": "cpu", **settings})
        assert caught.value.code == code
        assert models.supervisor.models() == ["first"]


async def test_two_loads_at_once_and_an_unload_meanwhile(models: Models) -> None:
    work = models.load("second")
    with pytest.raises(ConflictError) as caught:
        models.load("second")
    assert caught.value.code == "model_already_loaded"
    other = models.load("third")
    await models.manager.unload("second")
    assert work.cancelled()
    await models.join("third")
    await other
    assert models.supervisor.models() == ["first", "third"]


async def test_downloads_come_before_loading(models: Models) -> None:
    gated = ModelSettings(model="not/there")
    with pytest.raises(GatewayError, match="accept the terms") as caught:
        await models.manager.load(gated, from_hub=True)
    assert (caught.value.status, caught.value.code) == (403, "model_gated")
    work = models.manager.load(ModelSettings(model="here/it-is"), from_hub=True)
    engine = await models.join("here/it-is")
    await work
    download = models.manager.downloads.all["here/it-is"].describe()
    assert (download["state"], download["done_bytes"], download["path"]) == ("done", 10, "/cache")
    assert not engine.lost


async def test_a_download_of_which_no_byte_comes_has_failed() -> None:
    """And the next one has its turn."""

    def command(model: str, max_bytes: int) -> list[str]:
        return ["sleep", "1000"] if model == "a/silent" else ["echo", '{"path": "/cache"}']

    downloads = Downloads(1, 100, 1.0, command=command)
    silent, other = downloads.start("a/silent"), downloads.start("b/b")
    with pytest.raises(HubError, match=r"no byte came for 1 s .*download_stall_s"):
        await silent.ended()
    assert (silent.state, silent.failure) == ("failed", "download_stalled")
    await other.ended()
    assert other.path == "/cache"


async def test_a_download_is_joined_and_cancelled(models: Models) -> None:
    downloads = models.manager.downloads
    download = downloads.start("slow/one")
    assert downloads.start("slow/one") is download
    # It waits for the one before it.
    assert downloads.start("here/it-is").state == "waiting"
    await until(lambda: download.state == "downloading")
    assert await downloads.cancel("slow/one")
    assert not await downloads.cancel("slow/one")
    with pytest.raises(ConflictError, match="cancelled"):
        await download.ended()
    await downloads.all["here/it-is"].ended()


async def test_an_unload_lets_running_calls_finish(models: Models) -> None:
    engine = models.registry.serving["first"][0]
    engine.running = 1
    unload = asyncio.create_task(models.manager.unload("first"))
    await until(lambda: engine.draining)
    assert models.state("first") == "unloading"
    assert models.supervisor.models() == []
    (refused,) = models.refused
    assert isinstance(refused, ModelNotFoundError)
    for attempt in (models.manager.unload("first"), _awaited(models.load, "first")):
        with pytest.raises(ConflictError):
            await attempt
    engine.running = 0
    engine._wake_idle_waiters()
    assert await unload == 0


async def _awaited(load: Any, name: str) -> None:
    await load(name)


async def test_an_unload_cuts_off_what_takes_too_long() -> None:
    async with Models(ModelSettings(model="first"), unload_timeout_s=0.05) as models:
        engine = await models.join("first")
        engine.running = 2
        assert await models.manager.unload("first") == 2
        assert "unloaded" in engine.lost_error().message


async def test_calls_wait_for_a_model_that_is_being_loaded(models: Models) -> None:
    work = models.load("second")
    waits = [asyncio.create_task(models.manager.wait_loaded("second")) for _ in range(3)]
    await models.join("second")
    await asyncio.gather(work, *waits)
    # Of one that is there, or is none of ours, nobody waits.
    await models.manager.wait_loaded("second")
    await models.manager.wait_loaded("unknown")


async def test_the_wait_has_a_deadline_and_a_bound() -> None:
    async with Models(load_wait_s=0.05, max_load_waiters=1) as models:
        models.load("slow")
        first = asyncio.create_task(models.manager.wait_loaded("slow"))
        await asyncio.sleep(0)  # lets it begin
        with pytest.raises(OverloadedError, match="max_load_waiters") as caught:
            await models.manager.wait_loaded("slow")
        assert caught.value.retry_after_s
        with pytest.raises(ModelLoadingError) as late:
            await first
        assert late.value.retry_after_s


async def test_nobody_waits_for_a_model_that_fails(models: Models) -> None:
    work = models.load("broken")
    await models.manager.wait_loaded("broken")
    with pytest.raises(ModelLoadError):
        await work


async def test_after_a_crash_calls_wait_for_the_restart() -> None:
    async with Models(ModelSettings(model="first"), load_wait_s=0.001) as models:
        engine = await models.join("first")
        models.registry.remove(engine.id, "it died")
        waits = [asyncio.create_task(models.manager.wait_loaded("first")) for _ in range(3)]
        await asyncio.sleep(0)  # lets them begin
        assert models.state("first") == "loading"
        await models.join("first")
        await asyncio.gather(*waits)


async def test_the_wait_for_a_restart_ends_with_the_time_that_loading_takes() -> None:
    async with Models(ModelSettings(model="first"), restart_wait_s=0.01) as models:
        engine = await models.join("first")
        (process,) = models.supervisor.processes
        assert process.load_s is not None
        process.load_s = 33.5
        models.registry.remove(engine.id, "it died")
        with pytest.raises(ModelLoadingError) as late:
            await models.manager.wait_loaded("first")
        assert late.value.retry_after_s is not None
        assert 30 <= late.value.retry_after_s <= 34
        # A call in mid-answer waits no longer, and counts for no limit.
        with pytest.raises(ModelLoadingError):
            await models.manager.wait_again("first")


async def test_nobody_waits_for_an_engine_that_failed_for_good() -> None:
    async with Models(ModelSettings(model="first")) as models:
        engine = await models.join("first")
        models.registry.remove(engine.id, "it died")
        wait = asyncio.create_task(models.manager.wait_loaded("first"))
        await asyncio.sleep(0)  # lets it begin
        (process,) = models.supervisor.processes
        models.supervisor._give_up(process, "it ended 3 times")
        await wait
        await models.manager.wait_loaded("first")


async def test_an_engine_of_another_host_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Models() as models:
        registry = models.registry
        registration = Register("far", scripted_info("far"), TextAssets(EMPTY_TOKENIZER))
        engine = registry.add(registration)
        registry.remove(engine.id, "the connection broke")
        assert registry.missing == ["far"]
        wait = asyncio.create_task(models.manager.wait_again("far"))
        await asyncio.sleep(0)  # lets it begin
        engine = registry.add(registration)
        await wait
        assert registry.missing == []
        # One that says goodbye does not.
        registry.drain(engine.id)
        registry.remove(engine.id, "its link was closed")
        assert registry.missing == []
        await models.manager.wait_again("far")
        monkeypatch.setattr(registry_module, "REJOIN_TIMEOUT_S", 0.01)
        engine = registry.add(registration)
        registry.remove(engine.id, "the connection broke")
        await models.manager.wait_again("far")
        assert registry.missing == []


async def test_an_idle_model_ends_and_is_started_for_a_call() -> None:
    async with Models(ModelSettings(model="first", idle_unload_s=0.05)) as models:
        engine = await models.join("first")
        for busy in ({"waiting": 1, "running": 0}, {"waiting": 0, "running": 1}):
            models.waiting["first"], engine.running = busy["waiting"], busy["running"]
            models.last_used["first"] = 0.0
            # Who looks at it finds it in use.
            await until(lambda: models.last_used["first"] > 0)
            assert models.state("first") == "ready"
        engine.running = 0
        await until(lambda: models.state("first") == "idle" and engine.lost)
        assert models.supervisor.models() == ["first"]
        waits = [asyncio.create_task(models.manager.wait_loaded("first")) for _ in range(2)]
        again = await models.join("first")
        await asyncio.gather(*waits)
        assert again is not engine


async def test_a_call_that_was_late_wakes_the_model() -> None:
    async with Models(ModelSettings(model="first"), idle_unload_s=0.05) as models:
        await models.join("first")
        await until(lambda: models.state("first") == "idle")
        models.waiting["first"] = 1
        await models.join("first")
        assert models.state("first") == "ready"
        assert "first" in models.registry.serving


async def test_an_idle_model_can_be_unloaded() -> None:
    async with Models(ModelSettings(model="first", idle_unload_s=0.03)) as models:
        await models.join("first")
        await until(lambda: models.state("first") == "idle")
        assert await models.manager.unload("first") == 0
        assert models.state("first") == "unloaded"
