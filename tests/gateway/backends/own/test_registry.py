"""The registry, remote engines and their channels; no sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from harness.gateway.scripted_worker import EMPTY_TOKENIZER, scripted_info
from hypothesis import given
from hypothesis import strategies as st
from parrot_engine.link.wire import Register, Submit, decode_from_gateway
from parrot_engine.protocol import (
    Event,
    Failed,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    SamplingParams,
)
from parrot_engine.text import TextAssets

from parrot_gateway.backends.own.registry import EngineRegistry, RegistrationRefused
from parrot_gateway.backends.own.remote import KeptContexts, RemoteEngine
from parrot_gateway.exceptions import EngineLostError, OverloadedError

WAIT_S = 5.0
TEXT = TextAssets(EMPTY_TOKENIZER)
SAMPLING = SamplingParams(4)


def register(model: str = "m", text: TextAssets = TEXT) -> Register:
    return Register("engine", scripted_info(model), text)


@pytest.fixture
def registry() -> EngineRegistry:
    return EngineRegistry(max_engines=3)


@pytest.fixture
def engine() -> RemoteEngine:
    return RemoteEngine("eng_1", register())


async def sent(engine: RemoteEngine) -> list[list[Any]]:
    """The primitives of each message that waits to be sent."""
    await asyncio.sleep(0)
    messages = []
    while (data := engine.take_outgoing()) is not None:
        message = decode_from_gateway(data)
        assert isinstance(message, Submit)
        messages.append(message.primitives)
    return messages


# --- registry ---


def test_models_and_engines(registry: EngineRegistry) -> None:
    assert registry.models() == []
    first, second = registry.add(register("a")), registry.add(register("b"))
    third = registry.add(register("a"))
    assert [served.id for served in registry.models()] == ["a", "b"]
    assert registry.models()[0].info == first.info
    assert registry.models()[0].created == int(first.joined_at)
    assert registry.serving["a"] == [first, third]
    assert list(registry.joined.values()) == [first, second, third]
    assert registry.joined.get(second.id) is second
    assert len({engine.id for engine in registry.joined.values()}) == 3
    assert all(len(engine.id) < 12 for engine in registry.joined.values()), "short, for tables"
    registry.remove(first.id, "gone")
    registry.remove(first.id, "gone")
    assert registry.joined.get(first.id) is None
    assert first.lost
    assert registry.serving["a"] == [third]


def test_no_more_engines_than_the_limit(registry: EngineRegistry) -> None:
    engines = [registry.add(register()) for _ in range(3)]
    with pytest.raises(RegistrationRefused, match="max_engines") as caught:
        registry.add(register())
    assert caught.value.retry
    registry.remove(engines[0].id, "gone")
    registry.add(register())


def test_one_name_one_tokenizer(registry: EngineRegistry) -> None:
    registry.add(register())
    other = replace(TEXT, chat_template="x")
    with pytest.raises(RegistrationRefused, match="another tokenizer") as caught:
        registry.add(register(text=other))
    assert not caught.value.retry
    registry.add(register("n", other))


def test_engines_of_a_model_share_a_tokenizer(registry: EngineRegistry) -> None:
    assert registry.shared_tokenizer(register()) is None
    first = registry.add(register())
    shared = registry.shared_tokenizer(register())
    assert shared is first.tokenizer
    again = registry.add(register(), shared)
    assert again.tokenizer is shared
    # Not once more for each engine: a large vocabulary's text is 10 MB.
    assert shared is not None
    assert again.text is shared.assets


async def test_an_engine_that_comes_back_stays_drained(registry: EngineRegistry) -> None:
    heard: list[str] = []
    registry.subscribe(lambda change, engine: heard.append(change))
    engine = registry.add(register())
    assert registry.set_drained("nobody", drained=True) == []
    assert registry.set_drained(engine.name, drained=True) == [engine]
    assert registry.set_drained(engine.id, drained=True) == [engine]
    assert ("m" in registry.serving, registry.drained) == (False, {"m": [engine]})
    assert [served.id for served in registry.models()] == ["m"]
    # What was placed there before still gets its contexts.
    engine.open(1).close()
    registry.remove(engine.id, "its link broke")
    again = registry.add(register())
    assert registry.drained == {"m": [again]}
    assert registry.set_drained(again.id, drained=False) == [again]
    assert (registry.serving["m"], registry.drained) == ([again], {})
    assert heard == ["joined", "drained", "left", "joined", "drained", "resumed"]


def test_draining_engines_get_nothing_new(registry: EngineRegistry) -> None:
    engine = registry.add(register())
    registry.drain(engine.id)
    assert "m" not in registry.serving
    assert registry.models() == []
    assert list(registry.joined.values()) == [engine]
    with pytest.raises(OverloadedError):
        engine.open(1)


def test_listeners_hear_changes_until_they_leave(registry: EngineRegistry) -> None:
    heard: list[tuple[str, str]] = []
    leave = registry.subscribe(lambda change, engine: heard.append((change, engine.id)))
    engine = registry.add(register())
    registry.drain(engine.id)
    registry.drain(engine.id)
    registry.remove(engine.id, "gone")
    leave()
    leave()
    registry.add(register())
    assert heard == [("joined", engine.id), ("draining", engine.id), ("left", engine.id)]


def test_engines_of_a_model(registry: EngineRegistry) -> None:
    assert "m" not in registry.serving
    registry.add(register("other"))
    assert "m" not in registry.serving
    engine = registry.add(register("m"))
    assert registry.serving["m"] == [engine]


# --- channels ---


async def test_what_is_submitted_in_one_turn_is_one_message(engine: RemoteEngine) -> None:
    with engine.open(2) as one, engine.open(1) as two:
        assert len({*one.context_ids, *two.context_ids}) == 3
        first, second = one.context_ids
        one.submit(Fill(first, [1, 2]))
        two.submit(Fill(two.context_ids[0], [3]))
        one.submit(Generate(second, SAMPLING, first))
        assert not engine.has_outgoing.is_set()
        (message,) = await sent(engine)
        assert message == [
            Fill(first, [1, 2]),
            Fill(two.context_ids[0], [3]),
            Generate(second, SAMPLING, first),
        ]
        assert not engine.has_outgoing.is_set()
        one.submit(FreeContext(second))
        assert await sent(engine) == [[FreeContext(second)]]


async def test_events_reach_their_channel(engine: RemoteEngine) -> None:
    with engine.open(1) as one, engine.open(1) as two:
        (a,), (b,) = one.context_ids, two.context_ids
        engine.deliver([Filled(a, 1, 0), Filled(b, 2, 0), Generated(a, [5]), Filled(10**6, 1, 0)])
        assert await one.next() == Filled(a, 1, 0)
        assert await two.next() == Filled(b, 2, 0)
        assert await one.next() == Generated(a, [5])
        waiting = asyncio.create_task(one.next())
        await asyncio.sleep(0)
        engine.deliver([Generated(a, [6])])
        assert await waiting == Generated(a, [6])
        engine.deliver([Generated(a, [7]), Generated(a, [8], None, "length")])
        assert await one.next() == Generated(a, [7])
        assert await one.next() == Generated(a, [8], None, "length")


async def test_a_report_of_more_tokens_than_were_queued_counts_for_its_context_only(
    engine: RemoteEngine,
) -> None:
    with engine.open(1) as one, engine.open(1) as other:
        (a,), (b,) = one.context_ids, other.context_ids
        one.submit(Fill(a, [1, 2, 3]), Fill(a, [6]))
        other.submit(Fill(b, [4, 5]))
        engine.deliver([Filled(a, 10, 0)])
        assert (engine.running, engine.queued_tokens) == (2, 2)
        engine.deliver([Filled(a, 1, 0), Filled(b, 2, 0)])
        assert (engine.running, engine.queued_tokens) == (0, 0)


async def test_a_wait_ends_by_its_limit_and_loses_nothing(engine: RemoteEngine) -> None:
    with engine.open(1) as channel:
        (context_id,) = channel.context_ids
        for number in range(3):
            with pytest.raises(TimeoutError):
                await channel.next(0)
            engine.deliver([Generated(context_id, [number])])
            assert await channel.next(0) == Generated(context_id, [number])


async def test_a_cancelled_wait_loses_nothing(engine: RemoteEngine) -> None:
    with engine.open(1) as channel:
        (context_id,) = channel.context_ids
        for number in range(3):
            waiting = asyncio.create_task(channel.next())
            await asyncio.sleep(0)
            engine.deliver([Generated(context_id, [number])])
            # The event is there, but the task has not run yet.
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await channel.next() == Generated(context_id, [number])


async def test_what_is_freed_says_what_shall_become_of_it(engine: RemoteEngine) -> None:
    with engine.open(2, retention="keep") as channel:
        first, second = channel.context_ids
        channel.submit(Fill(first, [1]), Fill(second, [1]), FreeContext(second))
        (message,) = await sent(engine)
        assert message[-1] == FreeContext(second, "keep")
    assert await sent(engine) == [[FreeContext(first, "keep")]]


async def test_what_was_kept_for_an_application_is_dropped_once(engine: RemoteEngine) -> None:
    for retention, application in (("keep", "a"), ("normal", "a"), ("keep", "b"), ("keep", "a")):
        with engine.open(1, retention=retention, application=application) as channel:
            channel.submit(Fill(channel.context_ids[0], [1]))
    await sent(engine)
    engine.drop_kept("a")
    assert await sent(engine) == [[FreeContext(1, "drop"), FreeContext(4, "drop")]]
    engine.drop_kept("a")
    engine.drop_kept("unknown")
    assert await sent(engine) == []


def test_kept_contexts_are_bounded() -> None:
    kept = KeptContexts(max_contexts=1000)
    for number in range(600):
        kept.add("busy", [number])
    assert kept.pop("busy") == list(range(344, 600))
    for number in range(2000):
        kept.add(f"a{number}", [number])
    assert len(kept) == 1000
    assert (kept.pop("a999"), kept.pop("a1000")) == ([], [1000])
    assert len(kept) == 999


async def test_leaving_frees_what_was_used(engine: RemoteEngine) -> None:
    async def failing_call() -> None:
        with engine.open(3) as channel:
            first, second, _ = channel.context_ids
            channel.submit(Fill(first, [1]), Fill(second, [1]), FreeContext(second))
            await sent(engine)
            raise KeyError

    with pytest.raises(KeyError):
        await failing_call()
    first = 1
    assert await sent(engine) == [[FreeContext(first)]]
    engine.deliver([Filled(first, 1, 0)])
    assert engine.running == 0
    assert engine.queued_tokens == 0


async def test_a_cancelled_call_frees_its_contexts(engine: RemoteEngine) -> None:
    entered = asyncio.Event()

    async def call() -> None:
        with engine.open(1) as channel:
            channel.submit(Fill(channel.context_ids[0], [1]))
            entered.set()
            await channel.next()

    task = asyncio.create_task(call())
    await entered.wait()
    assert len(await sent(engine)) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ((free,),) = await sent(engine)
    assert isinstance(free, FreeContext)


async def test_a_lost_engine_ends_every_wait(engine: RemoteEngine) -> None:
    with engine.open(1) as busy, engine.open(1) as idle, engine.open(1) as behind:
        (context_id,) = behind.context_ids
        engine.deliver([Filled(context_id, 1, 0)])
        busy.submit(Fill(busy.context_ids[0], [1]))
        waiting = asyncio.create_task(busy.next())
        await asyncio.sleep(0)
        engine.lose("the connection broke")
        engine.lose("again")
        with pytest.raises(EngineLostError, match="the connection broke"):
            await waiting
        with pytest.raises(EngineLostError):
            idle.submit(Fill(idle.context_ids[0], [1]))
        with pytest.raises(EngineLostError):
            idle.submit(FreeContext(idle.context_ids[0]))
        # What had arrived is still given out.
        assert await behind.next() == Filled(context_id, 1, 0)
        with pytest.raises(EngineLostError):
            await behind.next()
        with pytest.raises(EngineLostError):
            engine.open(1)
    assert await sent(engine) == []
    assert engine.describe()["state"] == "lost"


@pytest.mark.parametrize("idle", [False, True])
async def test_who_waits_for_a_quiet_engine_is_told_that_it_is_lost(
    engine: RemoteEngine, idle: bool
) -> None:
    with engine.open(1) as channel:
        channel.submit(Fill(channel.context_ids[0], [1, 2]))
        waiting = asyncio.create_task(engine.wait_idle(idle=idle))
        await asyncio.sleep(0)
        engine.lose("it was gone")
        with pytest.raises(EngineLostError, match="it was gone"):
            async with asyncio.timeout(WAIT_S):
                await waiting


async def test_an_engine_is_idle_when_prompts_are_filled_and_idle_when_nothing_runs(
    engine: RemoteEngine,
) -> None:
    with engine.open(1) as channel:
        (context_id,) = channel.context_ids
        channel.submit(Fill(context_id, [1, 2]), Generate(context_id, SAMPLING))
        quiet, idle = (asyncio.create_task(engine.wait_idle(idle=i)) for i in (False, True))
        await asyncio.sleep(0)
        engine.deliver([Filled(context_id, 2, 0)])
        async with asyncio.timeout(WAIT_S):
            await quiet
        assert not idle.done()
    # Its context was freed.
    async with asyncio.timeout(WAIT_S):
        await idle


async def test_too_much_waiting_to_be_sent_is_refused() -> None:
    engine = RemoteEngine("eng_1", register(), max_unsent_bytes=10_000)
    with engine.open(1) as channel:
        (context_id,) = channel.context_ids
        # Counted before it is encoded, and after.
        channel.submit(Fill(context_id, [1000] * 4000))
        with pytest.raises(OverloadedError):
            channel.submit(Fill(context_id, [1]))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            engine.open(1)
        channel.submit(FreeContext(context_id))
        assert [len(message) for message in await sent(engine)] == [1, 1]
        channel.submit(Fill(context_id, [1]))


async def test_what_cannot_be_encoded_fails_alone(engine: RemoteEngine) -> None:
    with engine.open(1) as bad, engine.open(1) as good:
        bad.submit(Fill(bad.context_ids[0], [2**70]))
        good.submit(Fill(good.context_ids[0], [1]))
        assert await sent(engine) == [[Fill(good.context_ids[0], [1])]]
        event = await bad.next()
        assert isinstance(event, Failed)
        assert event.code == "invalid_request"


async def test_the_channels_salt(engine: RemoteEngine) -> None:
    with engine.open(1, salt="tenant") as channel:
        (context_id,) = channel.context_ids
        channel.submit(Fill(context_id, [1]), Fill(context_id, [1], salt="own"))
        ((first, second),) = await sent(engine)
        assert (first.salt, second.salt) == ("tenant", "own")


def test_a_channel_needs_a_context(engine: RemoteEngine) -> None:
    with pytest.raises(ValueError):
        engine.open(0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["fill", "generate", "free", "fail", "work"]), st.integers(0, 2)),
    max_size=40,
)


@given(STEPS)
def test_gauges_follow_the_work(steps: list[tuple[str, int]]) -> None:
    """The gauges equal a count of unfinished work after every event."""

    async def story() -> None:
        engine = RemoteEngine("eng_1", register())
        with engine.open(3) as channel:
            todo: dict[int, list[Fill | Generate]] = {c: [] for c in channel.context_ids}
            for action, index in steps:
                context_id = channel.context_ids[index]
                queue = todo[context_id]
                if action == "fill":
                    queue.append(Fill(context_id, [1] * (index + 3)))
                    channel.submit(queue[-1])
                elif action == "generate":
                    queue.append(Generate(context_id, SAMPLING))
                    channel.submit(queue[-1])
                elif action == "free":
                    queue.clear()
                    channel.submit(FreeContext(context_id))
                elif action == "fail":
                    queue.clear()
                    engine.deliver([Failed(context_id, "engine_error", "x")])
                elif queue:
                    done = queue.pop(0)
                    event: Event = Generated(context_id, [1], None, "length")
                    if isinstance(done, Fill):
                        event = Filled(context_id, len(done.token_ids), 0)
                    engine.deliver([Generated(context_id, [1]), event])
                assert engine.running == sum(map(bool, todo.values()))
                assert engine.queued_tokens == sum(
                    len(p.token_ids) for q in todo.values() for p in q if isinstance(p, Fill)
                )
        assert (engine.running, engine.queued_tokens) == (0, 0)

    asyncio.run(story())
