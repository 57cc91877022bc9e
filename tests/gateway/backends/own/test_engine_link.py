"""Both ends of the link together, over a real socket."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from typing import Any

import pytest
from harness.engine_checks import greedy
from harness.gateway import scripted_worker
from harness.gateway.linked import KEY, OWN_KEY, WAIT_S, join_server, joined, scripted_engine
from harness.gateway.scripted_worker import EMPTY_TOKENIZER, scripted_info
from harness.scripted_engine import ScriptedEngine
from harness.waiting import until
from parrot_engine.link.client import LinkRefusedError
from parrot_engine.link.wire import Goodbye, Register, Registered, decode_from_gateway, encode
from parrot_engine.loading.factory import LoadedEngine
from parrot_engine.protocol import Failed, Fill, Filled, Generate, Generated
from parrot_engine.server.command import EXIT_CRASH, run_joined
from parrot_engine.text import TextAssets
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from parrot_gateway.backends.own.registry import EngineRegistry
from parrot_gateway.backends.own.remote import EngineChannel
from parrot_gateway.exceptions import EngineLostError

HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def registry() -> EngineRegistry:
    return EngineRegistry(max_engines=4)


async def read_to_the_end(websocket: ClientConnection) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            await websocket.recv()


async def exhaust(channel: EngineChannel) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            await channel.next()


async def generate(channel: Any, prompt: list[int], count: int) -> list[int]:
    (context_id,) = channel.context_ids
    channel.submit(Fill(context_id, prompt), Generate(context_id, greedy(count)))
    tokens: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while True:
            event = await channel.next()
            if isinstance(event, Generated):
                tokens += event.token_ids
                if event.finish_reason is not None:
                    break
            else:
                assert isinstance(event, Filled)
    return tokens


async def test_others_may_not_take_the_name_of_an_engine_of_the_gateways_own(
    registry: EngineRegistry,
) -> None:
    async with join_server(registry, is_own_name="m-0".__eq__) as url:
        async with scripted_engine(url, name="m-0") as link:
            with pytest.raises(LinkRefusedError, match="give this one another name"):
                await link
        async with scripted_engine(url, name="m-0", key=OWN_KEY):
            assert (await joined(registry)).name == "m-0"


async def test_calls_run_on_a_joined_engine(registry: EngineRegistry) -> None:
    async with join_server(registry) as url, scripted_engine(url, name="box:1"):
        engine = await joined(registry)
        assert engine.name == "box:1"
        assert engine.info == scripted_info("scripted")

        async def call(number: int) -> list[int]:
            with engine.open(1) as channel:
                return await generate(channel, [number % 5], 8)

        results = await asyncio.gather(*(call(number) for number in range(40)))
        assert all(len(tokens) == 8 for tokens in results)
        assert results[0] == results[5]
        assert results[0] != results[1]
        # Everything was freed, which the heartbeats tell.
        await until(lambda: engine.stats.generated_tokens == 320)
        await until(lambda: engine.stats.contexts == 0)
        assert (engine.running, engine.queued_tokens) == (0, 0)


async def test_an_engine_that_leaves_is_gone(registry: EngineRegistry) -> None:
    async with join_server(registry) as url:
        async with scripted_engine(url):
            engine = await joined(registry)
        await until(lambda: not registry.joined)
        assert engine.lost


async def test_a_cancelled_call_stops_on_the_engine(registry: EngineRegistry) -> None:
    async with join_server(registry) as url, scripted_engine(url):
        engine = await joined(registry)
        with engine.open(1) as channel:
            (context_id,) = channel.context_ids
            channel.submit(Fill(context_id, [1]), Generate(context_id, greedy(90_000)))
            assert isinstance(await channel.next(), Filled)
        await until(lambda: engine.stats.steps > 0 and engine.stats.contexts == 0)
        assert engine.stats.generated_tokens < 90_000


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"},
                                     {"Authorization": f"Basic {KEY}"}])  # fmt: skip
async def test_without_the_key_nobody_joins(
    registry: EngineRegistry, headers: dict[str, str]
) -> None:
    async with join_server(registry) as url:
        with pytest.raises(InvalidStatus) as caught:
            await connect(url, additional_headers=headers, proxy=None)
        assert caught.value.response.status_code == 401
        assert caught.value.response.headers["x-request-id"].startswith("req_")
        assert b"invalid_api_key" in caught.value.response.body
        assert KEY.encode() not in caught.value.response.body


def registration(**changes: Any) -> bytes:
    values = {"name": "x", "info": scripted_info("scripted"), "text": TextAssets(EMPTY_TOKENIZER)}
    return encode(Register(**{**values, **changes}))


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (b"\x00", 1002),
        ("text", 1002),
        (encode(Goodbye("early")), 1002),
        (registration(text=TextAssets("not a tokenizer")), 1002),
        (registration(protocol_version=999), 1013),
    ],
    ids=["junk", "text", "early", "tokenizer", "version"],
)
async def test_a_wrong_beginning_ends_the_connection(
    registry: EngineRegistry, first: Any, code: int
) -> None:
    async with join_server(registry) as url:
        async with connect(url, additional_headers=HEADERS, proxy=None) as websocket:
            await websocket.send(first)
            with pytest.raises(ConnectionClosed) as caught:
                await read_to_the_end(websocket)
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == code
        assert not registry.joined


async def test_a_refused_engine_is_told_why(registry: EngineRegistry) -> None:
    async with join_server(registry) as url, scripted_engine(url):
        await joined(registry)
        other = TextAssets(EMPTY_TOKENIZER, "another template")
        async with scripted_engine(url, text=other) as running:
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(LinkRefusedError, match="another tokenizer"):
                    await running


async def test_junk_in_the_middle_ends_the_link(registry: EngineRegistry) -> None:
    async with (
        join_server(registry) as url,
        connect(url, additional_headers=HEADERS, proxy=None) as websocket,
    ):
        await websocket.send(registration())
        assert isinstance(decode_from_gateway(await websocket.recv()), Registered)
        engine = await joined(registry)
        with engine.open(1) as channel:
            waiting = asyncio.create_task(channel.next())
            await websocket.send(b"junk")
            with pytest.raises(EngineLostError, match="protocol error"):
                await waiting


async def test_an_engine_without_heartbeats_is_lost(registry: EngineRegistry) -> None:
    async with (
        join_server(registry, heartbeat_s=0.05) as url,
        connect(url, additional_headers=HEADERS, proxy=None) as websocket,
    ):
        await websocket.send(registration())
        engine = await joined(registry)
        with engine.open(1) as channel:
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(EngineLostError, match="no heartbeat"):
                    await channel.next()
        assert not registry.joined
        with pytest.raises(ConnectionClosed):
            await read_to_the_end(websocket)


async def test_a_long_step_is_not_taken_for_silence(registry: EngineRegistry) -> None:
    go_on, entered = threading.Event(), threading.Event()

    def before_step() -> None:
        entered.set()
        assert go_on.wait(WAIT_S)

    async with (
        join_server(registry, heartbeat_s=0.05) as url,
        scripted_engine(url, before_step=before_step),
    ):
        engine = await joined(registry)
        with engine.open(1) as channel:
            channel.submit(Fill(channel.context_ids[0], [1]))
            await asyncio.to_thread(entered.wait, WAIT_S)
            beats: list[Any] = []
            while len(beats) < 6:
                # Each heartbeat brings new statistics.
                current = engine.stats
                await until(lambda current=current: engine.stats is not current)
                beats.append(current)
            go_on.set()
            assert isinstance(await channel.next(), Filled)


async def test_an_engine_that_beats_and_computes_nothing_is_lost(registry: EngineRegistry) -> None:
    go_on, entered = threading.Event(), threading.Event()

    def before_step() -> None:
        entered.set()
        assert go_on.wait(WAIT_S)

    async with (
        join_server(registry, heartbeat_s=0.05, stall_s=0.3) as url,
        scripted_engine(url, model="idle"),
        scripted_engine(url, before_step=before_step),
    ):
        idle, engine = await joined(registry, "idle"), await joined(registry)
        with engine.open(1) as channel:
            channel.submit(Fill(channel.context_ids[0], [1]))
            await asyncio.to_thread(entered.wait, WAIT_S)
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(EngineLostError, match="ran no step") as lost:
                    await channel.next()
        assert lost.value.kind == "stalled"
        assert registry.losses == {("scripted", "stalled"): 1}
        # One without work does nothing, as it should.
        assert not idle.lost
        # Once it goes on it joins as a fresh engine, and what it had is gone.
        go_on.set()
        again = await joined(registry)
        with again.open(1) as channel:
            channel.submit(Fill(channel.context_ids[0], [1, 2]))
            event = await channel.next(WAIT_S)
            assert isinstance(event, Filled)
            assert event.num_tokens == 2


async def test_goodbye_lets_running_calls_finish(registry: EngineRegistry) -> None:
    async with join_server(registry) as url:
        async with connect(url, additional_headers=HEADERS, proxy=None) as websocket:
            await websocket.send(registration())
            engine = await joined(registry)
            with engine.open(1) as channel:
                await websocket.send(encode(Goodbye("maintenance")))
                await until(lambda: engine.draining)
                assert "scripted" not in registry.serving
                channel.submit(Fill(channel.context_ids[0], [1]))
                assert not engine.lost
        await until(lambda: not registry.joined)


async def test_killing_the_engine_process_ends_its_calls(registry: EngineRegistry) -> None:
    # A broken connection is noticed by itself: heartbeats are missed after minutes only.
    async with join_server(registry, heartbeat_s=60.0) as url:
        child = await asyncio.create_subprocess_exec(
            sys.executable, scripted_worker.__file__, "serve", "--join", url,
            env={**os.environ, "PARROT_JOIN_KEY": KEY}, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            engine = await joined(registry)
            with engine.open(1) as channel:
                (context_id,) = channel.context_ids
                channel.submit(Fill(context_id, [1]), Generate(context_id, greedy(90_000)))
                assert isinstance(await channel.next(), Filled)
                child.send_signal(signal.SIGKILL)
                with pytest.raises(EngineLostError):
                    await exhaust(channel)
            assert not registry.joined
        finally:
            if child.returncode is None:
                await child.wait()


async def test_a_broken_engine_ends_its_program(
    registry: EngineRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = threading.Event()

    def before_step() -> None:
        if broken.is_set():
            raise RuntimeError("out of paper")

    engine = ScriptedEngine(info=scripted_info("scripted"), before_step=before_step)
    loaded = LoadedEngine(engine, TextAssets(EMPTY_TOKENIZER))
    monkeypatch.setenv("PARROT_JOIN_KEY", KEY)
    async with join_server(registry) as url:
        program = asyncio.create_task(run_joined(loaded, url, "test"))
        remote = await joined(registry)
        broken.set()
        with remote.open(1) as channel:
            channel.submit(Fill(channel.context_ids[0], [1]))
            event = await channel.next()
            assert isinstance(event, Failed)
            assert event.code == "engine_lost"
        async with asyncio.timeout(WAIT_S):
            assert await program == EXIT_CRASH
        await until(lambda: not registry.joined)
