"""The scheduler in the gateway: who runs where, who waits, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from harness.gateway.scripted_remote import SYSTEM, fills, small_engine
from harness.gateway.serving import Service, serving
from harness.own_policies import TURNS
from harness.waiting import until
from hypothesis import given
from hypothesis import strategies as st
from parrot_engine.kv_cache.block_hash import prompt_hashes
from parrot_engine.link.wire import Adapters
from parrot_engine.protocol import AdapterInfo, BlockChanges, EngineStats, Fill, SamplingParams
from parrot_scheduler.event_log import replay
from parrot_scheduler.task import StepModel
from typer.testing import CliRunner

from parrot_gateway.calls.generation_request import GenerationRequest, TokenizedPrompt
from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.cli.graph import read_graph
from parrot_gateway.cli.main import app
from parrot_gateway.exceptions import ModelNotFoundError
from parrot_gateway.routing.placer import task_of
from parrot_gateway.routing.step_times import Scale, StepTimes
from parrot_gateway.semantic.drawing.text import to_text
from parrot_gateway.settings.config_file import ConfigError
from parrot_gateway.settings.model import SchedulerSettings
from parrot_gateway.settings.sources import load_settings


async def ask(service: Service, prompt: str, **more: Any) -> tuple[int, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, **more}
    return await service.ask("/v1/completions", body)


def tasks_of(service: Service) -> int:
    found = service.gateway.scheduling.describe()["tasks"]
    assert isinstance(found, int)
    return found


async def test_calls_with_an_adapter_go_where_it_is() -> None:
    """And to all engines once all have it; the same prompt has other hashes there."""
    engines = small_engine(), small_engine()
    adapter = AdapterInfo("sql", "ff", "/adapters/sql", 8)
    async with serving(*engines) as service:
        registry = service.gateway.registry
        first, second = registry.joined.values()
        registry.note_adapters(second, Adapters([adapter], 0))
        for _ in range(3):
            assert (await ask(service, SYSTEM, model="sql"))[0] == 200
        assert [fills(engine) for engine in engines] == [0, 3]
        named = {item.adapter for item in engines[1].submitted if isinstance(item, Fill)}
        assert named == {"ff"}
        registry.note_adapters(first, Adapters([replace(adapter, id="00")], 0))
        assert registry.adapted["sql"] == [first]
        registry.note_adapters(first, Adapters([adapter], 0))
        assert registry.adapted["sql"] == [first, second]
        for _ in range(2):
            answers = await asyncio.gather(
                *(ask(service, f"{number} {SYSTEM}", model="sql") for number in range(12))
            )
            assert {status for status, _ in answers} == {200}
        assert all(fills(engine) > 3 for engine in engines)
    assert prompt_hashes(range(32), 16) != prompt_hashes(range(32), 16, "", "ff")
    assert prompt_hashes(range(32), 16) == prompt_hashes(range(32), 16, "", "")


async def test_a_call_waits_until_the_next_engine_has_its_adapter() -> None:
    engines = small_engine(), small_engine(automatic=False)
    adapter = AdapterInfo("sql", "ff", "/adapters/sql", 8)
    async with serving(*engines) as service:
        registry = service.gateway.registry
        first, second = registry.joined.values()
        registry.note_adapters(second, Adapters([adapter], 0))
        call = asyncio.create_task(ask(service, SYSTEM, model="sql"))
        await engines[1].wait_for(lambda: fills(engines[1]) == 1)
        registry.remove(second.id, "it was unplugged")
        engines[1].contexts.clear()
        await until(lambda: not tasks_of(service))
        # Another one of the name is not the same.
        registry.note_adapters(first, Adapters([replace(adapter, id="00")], 0))
        await asyncio.sleep(0)
        assert fills(engines[0]) == 0
        registry.note_adapters(first, Adapters([adapter], 0))
        assert (await call)[0] == 200
        assert [item.adapter for item in engines[0].submitted if isinstance(item, Fill)] == ["ff"]


def test_a_call_of_many_prompts_is_no_smaller_than_its_longest() -> None:
    info = small_engine(4).info
    prompts = [TokenizedPrompt([1] * 500), *(TokenizedPrompt([1] * 4) for _ in range(99))]
    request = GenerationRequest(prompts, SamplingParams(max_tokens=8))
    made = task_of(1, request, CallMetadata(), info=info, prefix=())
    assert (made.prompt_tokens, made.num_sequences) == (500, 2)


def test_calls_with_one_beginning_are_of_one_kind() -> None:
    """Where nothing else says what they have in common: for predictions of their lengths."""
    info = small_engine().info
    request = GenerationRequest([TokenizedPrompt([1] * 200)], SamplingParams(max_tokens=8))

    def template(prefix: tuple[int, ...], given: str = "") -> str:
        metadata = CallMetadata(template=given)
        return task_of(1, request, metadata, info=info, prefix=prefix).template

    assert template((1, 2, 3, 4, 5)) == template((1, 2, 3, 4, 6)) != template((1, 2, 3, 5, 6))
    assert template((1, 2)) != template((1, 3))
    assert template(()) == ""
    assert template((1, 2), "given") == "given"


async def test_calls_that_do_not_fit_wait_and_then_run() -> None:
    engine = small_engine(1, automatic=False)
    async with serving(engine) as service:
        first = asyncio.create_task(ask(service, "a"))
        await engine.wait_for(lambda: fills(engine) == 1)
        second = asyncio.create_task(ask(service, "b"))
        await until(lambda: tasks_of(service) == 2)
        assert fills(engine) == 1
        engine.automatic = True
        engine.step()
        assert [status for status, _ in await asyncio.gather(first, second)] == [200, 200]
        await until(lambda: tasks_of(service) == 0)
        described = service.gateway.scheduling.describe()
        assert described["placed"] == 2
        (row,) = described["models"]["m"]["engines"]
        assert (row["tasks"], row["batch"], row["working_set_tokens"]) == (0, 0, 0)
        assert described["ignored"] == {}
        # Each was an application of its own, and is not expected to come back.
        assert described["models"]["m"]["applications"] == 0


async def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    engine = small_engine(1, automatic=False)
    async with serving(engine) as service:
        first = asyncio.create_task(ask(service, "a"))
        await engine.wait_for(lambda: fills(engine) == 1)
        body = json.dumps({"model": "m", "prompt": "b"}).encode()
        _, writer = await service.send("/v1/completions", body)
        await until(lambda: tasks_of(service) == 2)
        writer.transport.abort()
        await until(lambda: tasks_of(service) == 1)
        engine.automatic = True
        engine.step()
        assert (await first)[0] == 200
        assert fills(engine) == 1


async def test_a_stream_that_waits_is_kept_alive() -> None:
    engine = small_engine(1, automatic=False)
    async with serving(engine, keep_alive_s=0.05) as service:
        first = asyncio.create_task(ask(service, "a"))
        await engine.wait_for(lambda: fills(engine) == 1)
        body = json.dumps({"model": "m", "prompt": "b", "stream": True, "max_tokens": 2}).encode()
        reader, writer = await service.send("/v1/completions", body)
        await reader.readuntil(b": keep-alive\n\n")
        engine.automatic = True
        engine.step()
        await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()
        assert (await first)[0] == 200


async def test_calls_with_one_prefix_go_where_it_is() -> None:
    engines = [small_engine(), small_engine()]
    async with serving(*engines) as service:
        await ask(service, SYSTEM + "first")
        (at,) = (index for index, engine in enumerate(engines) if fills(engine))
        tokens = engines[at].tokenizer.encode(SYSTEM)
        hashes = prompt_hashes(tokens[: len(tokens) // 16 * 16], 16)
        service.remotes[at].note_blocks(BlockChanges(list(hashes), []))
        for number in range(6):
            await ask(service, f"{SYSTEM}{number}")
        assert fills(engines[at]) == 7
        assert fills(engines[1 - at]) == 0
        # What is elsewhere now draws calls to there.
        service.remotes[at].note_blocks(BlockChanges([], list(hashes)))
        service.remotes[1 - at].note_blocks(BlockChanges(list(hashes), []))
        for number in range(6):
            await ask(service, f"{SYSTEM}{number} again")
        assert fills(engines[1 - at]) == 6


async def test_a_policy_of_the_users_own_decides() -> None:
    engines = [small_engine(), small_engine(), small_engine()]
    async with serving(*engines, scheduler=SchedulerSettings(policy=TURNS)) as service:
        for number in range(9):
            await ask(service, f"{SYSTEM}{number}")
    assert [fills(engine) for engine in engines] == [3, 3, 3]


async def test_calls_of_an_engine_that_goes_run_on_another() -> None:
    engines = [small_engine(1, automatic=False), small_engine(1, automatic=False)]
    async with serving(*engines) as service:
        calls = [asyncio.create_task(ask(service, str(number))) for number in range(3)]
        await until(lambda: fills(engines[0]) and fills(engines[1]) and tasks_of(service) == 3)
        service.gateway.registry.remove(service.remotes[0].id, "it was unplugged")
        engines[0].contexts.clear()
        engines[1].automatic = True
        engines[1].step()
        answers = await asyncio.gather(*calls)
        assert [status for status, _ in answers] == [200, 200, 200]
        assert fills(engines[1]) == 3
        await until(lambda: tasks_of(service) == 0)


async def test_a_call_that_waits_too_long_is_told_so() -> None:
    engine = small_engine(1, automatic=False)
    async with serving(engine, scheduler=SchedulerSettings(max_wait_s=0.05)) as service:
        first = asyncio.create_task(ask(service, "a"))
        await engine.wait_for(lambda: fills(engine) == 1)
        status, answer = await ask(service, "b")
        assert status == 503
        assert answer["error"]["code"] == "wait_too_long"
        engine.automatic = True
        engine.step()
        assert (await first)[0] == 200


async def test_a_full_queue_refuses() -> None:
    engine = small_engine(1, automatic=False)
    async with serving(engine, scheduler=SchedulerSettings(max_queued=1)) as service:
        first = asyncio.create_task(ask(service, "a"))
        await engine.wait_for(lambda: fills(engine) == 1)
        second = asyncio.create_task(ask(service, "b"))
        await until(lambda: tasks_of(service) == 2)
        status, answer = await ask(service, "c")
        assert (status, answer["error"]["code"]) == (503, "queue_full")
        engine.automatic = True
        engine.step()
        assert [status for status, _ in await asyncio.gather(first, second)] == [200, 200]


async def test_what_is_recorded_replays_to_the_same_decisions(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    engines = [small_engine(2), small_engine(2)]
    async with serving(*engines, scheduler=SchedulerSettings(record=log)) as service:
        waiting = [ask(service, f"{SYSTEM}{number % 5}", max_tokens=3) for number in range(40)]
        assert {status for status, _ in await asyncio.gather(*waiting)} == {200}
        await until(lambda: tasks_of(service) == 0)
        await service.gateway.close()
    lines = log.read_text().splitlines()
    inputs = [line for line in lines if not line.startswith('{"actions"')]
    decided = [line for line in lines if line.startswith('{"actions"')]
    assert len(decided) > 40
    events = [event for line in inputs for event in json.loads(line).get("events", ())]
    ended = [event for event in events if event["kind"] == "TaskFinished"]
    assert {event["generated_tokens"] for event in ended} == {3}
    assert "".join(inputs).count('"succeeded":true') == 40
    assert list(replay(inputs)) == decided


async def test_a_call_tells_where_it_ran_and_why() -> None:
    engines = [small_engine(), small_engine()]
    async with serving(*engines) as service:
        semantic = {"session": "s", "output": "o"}
        body = {"model": "m", "prompt": SYSTEM, "max_tokens": 4, "parrot": semantic}
        status, headers, _ = await service.post("/v1/completions", body)
        assert status == 200
        async with aiohttp.ClientSession(service.root) as http:
            graph = await (await http.get("/v1/sessions/s/graph")).read()
        (call,) = json.loads(graph)["calls"]
        assert call["engine"] == headers[b"x-parrot-engine"].decode()
        assert call["placement"] == "load of 2"
        assert f"{call['engine']}: load of 2" in to_text(read_graph(graph))


async def test_the_queue_header_tells_of_the_wait_for_an_engine_too() -> None:
    engine = small_engine(1, automatic=False)
    async with serving(engine) as service:
        first = asyncio.create_task(ask(service, "a"))
        await engine.wait_for(lambda: fills(engine) == 1)
        body = {"model": "m", "prompt": "b", "max_tokens": 4, "parrot": {"session": "s"}}
        second = asyncio.create_task(service.post("/v1/completions", body))
        await until(lambda: tasks_of(service) == 2)
        begun = time.perf_counter()
        async with service.client() as client:
            await client.models.list()
        waited_ms = (time.perf_counter() - begun) * 1000
        engine.automatic = True
        engine.step()
        assert (await first)[0] == 200
        status, headers, _ = await second
        assert status == 200
        assert int(headers[b"x-parrot-queue-ms"]) >= int(waited_ms) > 0


@pytest.mark.parametrize("field", ["policy", "admission", "order", "place", "keep"])
def test_a_policy_that_there_is_not_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        load_settings({"scheduler": {field: "nonsense"}})
    with pytest.raises(ConfigError, match=rf"scheduler\.{field}.*'own\.Policy'"):
        load_settings({"scheduler": {field: "own.Policy"}})


@pytest.mark.parametrize(
    ("field", "path", "message"),
    [
        ("policy", "no.such:Policy", "no.such cannot be imported: No module named 'no'"),
        ("policy", "harness.own_policies:Gone", "harness.own_policies has no class Gone"),
        ("policy", "harness.own_policies:not_a_class", "is no policy: .* AdmissionPolicy, "),
        ("policy", "harness.own_policies:Unfinished", "cannot be made: .* abstract method '?place"),
        ("policy", "harness.own_policies:Misconfigured", "the setup of .*'colour'"),
        ("order", TURNS, "is no policy: it does not inherit from OrderPolicy"),
        ("keep", "harness.own_policies:not_a_class", "it does not inherit from RetentionPolicy"),
    ],
)
async def test_a_policy_that_cannot_be_loaded_is_named_by_its_field(
    field: str, path: str, message: str, tmp_path: Path
) -> None:
    """A start tells it, and so does `serve --check`."""
    settings = SchedulerSettings(**{field: path})
    with pytest.raises(ConfigError, match=rf"^scheduler\.(policy|place|{field}): .*{message}"):
        async with serving(small_engine(), scheduler=settings):
            raise AssertionError
    file = tmp_path / "parrot.yaml"
    file.write_text(f"scheduler:\n  {field}: {path}\n")
    checked = CliRunner().invoke(app, ["serve", "--check", "--port", "0", "--config", str(file)])
    assert checked.exit_code == 2
    assert re.search(rf"scheduler\.(policy|place|{field}): .*{message}", checked.output)


# -- how long steps take --------------------------------------------------------------------

GUESS = StepModel(weights_s=2e-2, context_token_s=1e-5, prefill_token_s=1e-4)
#: Of the engine that is learned: 1,000 blocks of 16 tokens.
BLOCKS, BLOCK_TOKENS = 1000, 16


def step_times() -> StepTimes:
    return StepTimes(GUESS, BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS)


def run(times: StepTimes, load: Callable[[int], tuple[int, int]], count: int) -> StepModel | None:
    """Heartbeats of an engine whose steps take 5 ms, 20 us for each filled token, and 1 us for
    each token in use, of which there are more and more, and then fewer."""
    stats, model = EngineStats(), None
    for index in range(count):
        steps, filled = load(index)
        used = 100 * (index // 2 % 7)
        free_before = stats.free_blocks or BLOCKS
        context = (used + BLOCKS - free_before) / 2 * BLOCK_TOKENS
        busy_s = steps * (5e-3 + context * 1e-6) + filled * 20e-6
        stats = replace(
            stats,
            steps=stats.steps + steps,
            filled_tokens=stats.filled_tokens + filled,
            busy_s=stats.busy_s + busy_s,
            free_blocks=BLOCKS - used,
        )
        model = times.note(stats)
    return model


def test_step_times_are_learned() -> None:
    model = run(step_times(), lambda index: (10 + index % 5, 1000 * (index % 4)), 200)
    assert model is not None
    assert model.weights_s == pytest.approx(5e-3, rel=0.25)
    assert model.prefill_token_s == pytest.approx(20e-6, rel=0.25)
    assert model.context_token_s == pytest.approx(1e-6, rel=0.25)


def test_what_a_sequence_adds_to_a_step_is_learned() -> None:
    """Steps of 5 ms, 1 us a token in use, and 0.3 ms for each of 1 to 12 sequences."""
    times, model = StepTimes(replace(GUESS, sequence_s=2e-3)), None
    for index in range(200):
        sequences, filled, used = 1 + index * 5 % 12, 1000 * (index % 4), 300 * (index % 7)
        busy_s = 10 * (5e-3 + 3e-4 * sequences + 1e-6 * used) + filled * 2e-5
        model = times.add(10, filled, used, busy_s, 10 * sequences)
    assert model is not None
    assert model.weights_s == pytest.approx(5e-3, rel=0.25)
    assert model.sequence_s == pytest.approx(3e-4, rel=0.25)


def test_what_the_readings_cannot_tell_changes_like_the_rest() -> None:
    """Decodes alone are slower than guessed: so, it is taken, are prompts."""
    model = run(StepTimes(GUESS), lambda index: (10, 0), 60)
    assert model is not None
    factor = model.weights_s / GUESS.weights_s
    assert 5e-3 / GUESS.weights_s < factor < 0.9
    assert model.prefill_token_s == pytest.approx(GUESS.prefill_token_s * factor, rel=0.01)


def test_an_engine_that_was_not_used_learns_from_others_of_its_kind() -> None:
    scale = Scale()
    used = StepTimes(GUESS, scale=scale)
    idle = StepTimes(GUESS, scale=scale)
    assert idle.note(EngineStats()) is None
    learned = run(used, lambda index: (10, 0), 60)
    model = idle.note(EngineStats())
    assert learned is not None
    assert model is not None
    assert model.weights_s == pytest.approx(learned.weights_s, rel=0.05)
    assert idle.note(EngineStats()) is None, "there is nothing new to tell"


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1000), st.integers(0, 10**6), st.floats(0, 1e4), st.integers(0, BLOCKS)
        ),
        max_size=40,
    )
)
def test_no_reading_makes_a_step_free(readings: list[tuple[int, int, float, int]]) -> None:
    times, stats = step_times(), EngineStats()
    for steps, filled, busy_s, free in readings:
        stats = replace(
            stats,
            steps=stats.steps + steps,
            filled_tokens=stats.filled_tokens + filled,
            busy_s=stats.busy_s + busy_s,
            free_blocks=free,
        )
        model = times.note(stats)
        if model is not None:
            terms = (model.weights_s, model.prefill_token_s, model.context_token_s)
            assert model.sequence_s == 0, "as guessed"
            assert all(0 < term < float("inf") for term in terms)


def test_an_idle_engine_teaches_nothing() -> None:
    assert run(step_times(), lambda index: (0, 0), 30) is None


def test_a_restarted_counter_is_no_reading() -> None:
    times = step_times()
    before = run(times, lambda index: (10, 50 * (index % 3)), 20)
    assert times.note(EngineStats()) is None
    after = times.note(EngineStats(steps=10, busy_s=0.05, free_blocks=BLOCKS))
    assert before is not None
    assert after is not None
    assert after.weights_s == pytest.approx(before.weights_s, rel=0.2)


async def test_calls_that_wait_for_a_model_are_refused_when_it_goes() -> None:
    engine = small_engine(1, automatic=False)
    async with serving(engine) as service:
        scheduling, model = service.gateway.scheduling, engine.info.model
        first = asyncio.create_task(ask(service, "one"))
        await until(lambda: fills(engine) == 1)
        waits = [asyncio.create_task(ask(service, f"more {number}")) for number in range(2)]
        await until(lambda: scheduling.waiting(model) == 2)
        assert scheduling.waiting("another") == 0
        assert scheduling.queues()[model]["queued"] == 2
        scheduling.refuse_waiting(model, ModelNotFoundError("It was unloaded.", param="model"))
        for status, answer in await asyncio.gather(*waits):
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert scheduling.waiting(model) == 0
        # The scheduler hears of it too: only the one that runs goes on.
        await until(lambda: scheduling.queues()[model]["queued"] == 0)
        assert scheduling.scheduler.num_tasks == 1
        engine.automatic = True
        engine.step()
        assert (await first)[0] == 200


async def test_an_engine_much_slower_than_its_peers_is_avoided() -> None:
    engines = [small_engine(64), small_engine(64)]
    slow, other = engines
    async with serving(*engines) as service:

        def beat(*step_s: float) -> None:
            """A minute of heartbeats, whose steps took this long on either engine."""
            for remote, each_s in zip(service.remotes, step_s, strict=True):
                for _ in range(30):
                    before = remote.stats
                    steps = before.steps + 50
                    busy_s = before.busy_s + 50 * each_s
                    remote.note_stats(
                        EngineStats(steps=steps, generated_tokens=steps, busy_s=busy_s)
                    )

        beat(0.004, 0.005)
        for number in range(8):
            await ask(service, f"{number} of equals {SYSTEM}")
        assert fills(slow) > 1
        before = fills(slow)
        beat(0.05, 0.005)
        await asyncio.gather(*(ask(service, f"{number} {SYSTEM}") for number in range(30)))
        # One, by which its step times stay known.
        assert fills(slow) - before <= 1
        # Where there is no other, it works.
        service.gateway.registry.set_drained(service.remotes[1].id, drained=True)
        assert (await ask(service, "alone"))[0] == 200
        assert fills(slow) - before <= 2
        assert fills(other) >= 29
