"""An upstream of several servers: which of them there are, through the whole gateway."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import msgspec
import pytest
from harness.gateway.fleets import MODEL, fleet, user
from harness.gateway.relaying import started
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import serving
from harness.scripted_upstream import ScriptedUpstream, error
from harness.waiting import until

from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.routing.fleet import fleet as fleet_module
from parrot_gateway.settings.model import UpstreamSettings


async def test_models_and_health(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine, models=None) as served:
        async with asyncio.timeout(60):
            await served.upstream.wait_ready()
        assert served.upstream.models() == ("fake", "fake-2")
        names = [each["name"] for each in served.servers()]
        assert names == ["vllm-1", "vllm-2"]
        assert all(each["takes_calls"] for each in served.servers())
        await served.chat([user("x")])
        described = served.service.gateway.scheduling.describe()["models"]["vllm"]
        # In the order in which they answered.
        assert sorted(each["engine_id"] for each in described["engines"]) == names


async def test_only_models_that_all_list_are_served(
    engine: ScriptedRemoteEngine, caplog: pytest.LogCaptureFixture
) -> None:
    fakes = [ScriptedUpstream("a", "b"), ScriptedUpstream("b", "c")]
    async with AsyncExitStack() as stack:
        for fake in fakes:
            stack.enter_context(fake)
        entry = UpstreamSettings(name="vllm", urls=[fake.base_url for fake in fakes])
        service = await stack.enter_async_context(serving(engine, upstreams=[entry]))
        upstream = service.gateway.upstreams["vllm"]
        with caplog.at_level(logging.WARNING):
            await stack.enter_async_context(started(upstream))
            await asyncio.wait_for(upstream.wait_ready(), 60)
            await until(lambda: "lists other models" in caplog.text)
        assert upstream.models() == ("b",)
        assert (upstream.serves("a"), upstream.serves("b")) == (False, True)


async def test_a_server_that_fails_gets_no_calls_until_it_answers_again(
    engine: ScriptedRemoteEngine,
) -> None:
    settings = {"breaker_failures": 2, "breaker_open_s": 0.05, "max_retries": 0}
    async with fleet(engine, **settings) as served:
        served.fakes[0].go_down()
        tried = []
        for number in range(24):
            body = {"model": MODEL, "messages": [user(f"{number} " * 50)]}
            status, headers, answer = await served.service.post("/v1/chat/completions", body)
            assert (status, headers[b"x-parrot-engine"]) == (200, b"vllm-2"), answer
            tried.append(headers.get(b"x-parrot-tried"))
        assert tried.count(b"vllm-1=connection") >= 2
        assert served.servers()[0]["breaker_openings"] >= 1
        served.fakes[0].go_up()
        await until(lambda: served.servers()[0]["takes_calls"])
        # The server that was away has computed less, and does not make up for it.
        names = [(await served.chat([user(f"{n} " * 50)]))[0] for n in range(100, 112)]
        assert all(names.count(name) >= 4 for name in ("vllm-1", "vllm-2")), names


async def test_a_server_that_was_away_is_tried_once_it_is_back(
    engine: ScriptedRemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "LAST_RESORT_S", 0.01)
    looks: list[str] = []
    look = Upstream.listens

    async def counted(upstream: Upstream) -> bool:
        looks.append(upstream.name)
        return await look(upstream)

    monkeypatch.setattr(Upstream, "listens", counted)
    settings = {"breaker_failures": 1, "breaker_open_s": 3600, "max_retries": 0}
    async with fleet(engine, **settings) as served:
        away, other = served.fakes
        away.go_down()
        for number in range(4):
            name, _ = await served.chat([user(f"{number} " * 50)])
            assert name == "vllm-2"
        assert served.servers()[0]["breaker"] == "open"
        # The first look is over once there is a second one.
        await until(lambda: len(looks) >= 2)
        away.go_up()
        await until(lambda: served.servers()[0]["takes_calls"])
        # One that listens and fails all calls is left alone for as long as the settings say.
        other.answer_all(error(500))
        for number in range(100, 104):
            name, _ = await served.chat([user(f"{number} " * 50)])
            assert name == "vllm-1"
        looks.clear()
        await until(lambda: len(looks) >= 3)
        assert served.servers()[1]["breaker"] == "open"


async def test_no_server_takes_calls(
    engine: ScriptedRemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "LAST_RESORT_S", 20.0)
    settings = {"breaker_failures": 1, "breaker_open_s": 30, "max_retries": 0}
    async with fleet(engine, **settings) as served:
        for fake in served.fakes:
            fake.go_down()
        body = {"model": MODEL, "messages": [user("x")]}
        answers = [await served.service.post("/v1/chat/completions", body) for _ in range(3)]
        assert [status for status, _, _ in answers] == [502, 503, 503]
        assert answers[0][1][b"x-parrot-tried"] == b"vllm-1=connection, vllm-2=connection"
        _, headers, answer = answers[-1]
        error = msgspec.json.decode(answer)["error"]
        assert error["code"] == "upstream_unavailable"
        assert "None of the 2 servers of the upstream 'vllm'" in error["message"]
        assert float(headers[b"retry-after"]) > 1
        stores = await served.service.post("/v1/vector_stores", {})
        assert stores[0] == 503


# What servers keep


async def test_the_fallback_answers_where_no_server_takes_calls(
    engine: ScriptedRemoteEngine,
) -> None:
    settings = {"breaker_failures": 1, "breaker_open_s": 30, "max_retries": 0, "fallback": "m"}
    async with fleet(engine, **settings) as served:
        for fake in served.fakes:
            fake.go_down()
        for _ in range(4):
            body = {"model": MODEL, "messages": [user("x")]}
            status, _, answer = await served.service.post("/v1/chat/completions", body)
            text = msgspec.json.decode(answer)["choices"][0]["message"]["content"]
            assert (status, text) == (200, "Hello world")
