"""Engines, servers of upstreams and the whole gateway: drained, and given calls again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.scripted_upstream import ScriptedUpstream
from harness.waiting import until

from parrot_gateway.settings.model import UpstreamSettings

ADMIN = {"Authorization": "Bearer the-admin-key"}


class Operated:
    """A served gateway, its operator and a client of it."""

    def __init__(self, service: Service, http: httpx.AsyncClient) -> None:
        self.service = service
        self.http = http
        self.client = service.client()

    async def admin(self, path: str, body: Any = None) -> Any:
        """The answer to a POST of the operator."""
        answer = await self.http.post(f"/admin/v1{path}", headers=ADMIN, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def engines(self) -> dict[str, dict[str, Any]]:
        """Entries of engines and servers, by id."""
        answer = await self.http.get("/admin/v1/engines", headers=ADMIN)
        return {entry["id"]: entry for entry in answer.json()["data"]}

    async def ask(self, model: str = "m") -> str:
        """The text of one call."""
        answer = await self.client.completions.create(model=model, prompt="Say", max_tokens=40)
        return str(answer.choices[0].text)

    async def readiness(self) -> tuple[int, str]:
        answer = await self.http.get("/health/readiness")
        return answer.status_code, answer.json()["status"]


@pytest.fixture(autouse=True)
def _admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARROT_ADMIN_KEY", "the-admin-key")


@asynccontextmanager
async def operated(*engines: ScriptedRemoteEngine, **settings: Any) -> AsyncIterator[Operated]:
    async with (
        serving(*engines, **settings) as service,
        httpx.AsyncClient(base_url=service.root) as http,
    ):
        for upstream in service.gateway.upstreams.values():
            await upstream.start()
        try:
            yield Operated(service, http)
        finally:
            for upstream in service.gateway.upstreams.values():
                await upstream.close()


async def test_calls_go_to_the_other_engine_and_running_ones_end() -> None:
    first, second = (
        ScriptedRemoteEngine("from the first", automatic=False),
        ScriptedRemoteEngine("from the second"),
    )
    async with operated(first, second) as gateway:
        ids = [remote.id for remote in gateway.service.remotes]
        await gateway.admin(f"/engines/{ids[1]}/drain")
        running = asyncio.create_task(gateway.ask())
        await first.wait_for(lambda: bool(first.contexts))
        await gateway.admin(f"/engines/{ids[1]}/undrain")

        (drained,) = (await gateway.admin(f"/engines/{ids[0]}/drain"))["data"]
        assert (drained["state"], drained["running"]) == ("draining", 1)
        assert [await gateway.ask() for _ in range(3)] == ["from the second"] * 3
        assert await gateway.readiness() == (200, "ok")
        first.automatic = True
        first.step()
        assert await running == "from the first"
        assert (await gateway.engines())[ids[0]]["running"] == 0
        page = (await gateway.http.get("/ui/api/overview", headers=ADMIN)).json()
        assert [each["state"] for each in page["engines"]] == ["draining", "serving"]
        health = (await gateway.http.get("/health")).json()
        assert [(each["state"], each["drained"]) for each in health["engines"]] == [
            ("draining", True),
            ("ready", False),
        ]

        await gateway.admin(f"/engines/{ids[0]}/undrain")
        await gateway.admin(f"/engines/{ids[1]}/drain")
        assert await gateway.ask() == "from the first"


async def test_a_model_whose_engines_are_all_drained_says_so_and_what_waits_waits_on() -> None:
    engine = ScriptedRemoteEngine(automatic=False)
    engine.info = replace(engine.info, max_batch_size=1)
    async with operated(engine) as gateway:
        (remote,) = gateway.service.remotes
        running = asyncio.create_task(gateway.ask())
        await engine.wait_for(lambda: bool(engine.contexts))
        headers = {"X-Parrot-Session": "app"}
        waiting = asyncio.create_task(
            gateway.client.with_options(default_headers=headers).completions.create(
                model="m", prompt="Say", max_tokens=40
            )
        )
        await until(lambda: gateway.service.gateway.scheduling.waiting("m") == 1)
        await gateway.admin(f"/engines/{remote.id}/drain")
        with pytest.raises(openai.InternalServerError) as refused:
            await gateway.ask()
        assert refused.value.status_code == 503
        assert (refused.value.code, refused.value.response.headers["retry-after"]) == (
            "drained",
            "10",
        )
        assert "All engines of the model 'm' are drained" in refused.value.message
        assert "m" in {model.id for model in (await gateway.client.models.list()).data}
        assert (await gateway.readiness())[0] == 503

        engine.automatic = True
        engine.step()
        assert await running == "Hello world"
        graph = (await gateway.http.get("/v1/sessions/app/graph")).json()
        assert "all engines of 'm' are drained" in str(graph)
        assert not waiting.done()
        await gateway.admin(f"/engines/{remote.id}/undrain")
        assert (await waiting).choices[0].text == "Hello world"
        assert (await gateway.readiness())[0] == 200


async def test_names_that_nobody_has_are_refused() -> None:
    async with operated(ScriptedRemoteEngine()) as gateway:
        answer = await gateway.http.post("/admin/v1/engines/no%2Fsuch/drain", headers=ADMIN)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "engine_not_found")
        assert "no/such" in error["message"]
        assert (await gateway.http.post("/admin/v1/engines/x/drain")).status_code == 401


async def test_servers_of_upstreams() -> None:
    servers = ExitStack()
    urls = [servers.enter_context(ScriptedUpstream()).base_url for _ in range(3)]
    upstreams = [
        UpstreamSettings(name="two", urls=urls[:2], models=["a"]),
        UpstreamSettings(name="one", url=urls[2], models=["b"], fallback="a"),
        UpstreamSettings(name="alone", url=urls[2], models=["c"]),
    ]
    try:
        async with operated(ScriptedRemoteEngine(), upstreams=upstreams) as gateway:

            async def answered_by(model: str) -> str:
                raw = await gateway.client.chat.completions.with_raw_response.create(
                    model=model, messages=[{"role": "user", "content": "Hello"}]
                )
                return str(raw.headers["x-parrot-engine"])

            await gateway.admin("/engines/two-1/drain")
            assert {await answered_by("a") for _ in range(4)} == {"two-2"}
            # What an upstream that is drained would answer goes to its fallback.
            assert await answered_by("b") == "one"
            await gateway.admin("/engines/one/drain")
            assert await answered_by("b") == "two-2"
            page = (await gateway.http.get("/ui/api/overview", headers=ADMIN)).json()
            states = {each["name"]: each["state"] for each in page["engines"]}
            assert (states["one"], states["alone"]) == ("draining", "serving")
            (entry,) = [each for each in page["engines"] if each["name"] == "alone"]
            await gateway.admin(f"/engines/{entry['id']}/drain")
            # By the name of the upstream: all its servers.
            assert len((await gateway.admin("/engines/two/drain"))["data"]) == 2
            for model, upstream in (("a", "two"), ("b", "one"), ("c", "alone")):
                with pytest.raises(openai.InternalServerError) as refused:
                    await answered_by(model)
                assert (refused.value.status_code, refused.value.code) == (503, "drained")
                assert f"upstream '{upstream}'" in refused.value.message
            states = {name: each["state"] for name, each in (await gateway.engines()).items()}
            assert {states[name] for name in ("two-1", "two-2", "one", "alone")} == {"draining"}
            await gateway.admin("/engines/two/undrain")
            await gateway.admin("/engines/alone/undrain")
            assert (await answered_by("b"))[:4] == "two-"
            assert await answered_by("c") == "alone"
    finally:
        servers.close()


async def test_a_drained_gateway_is_not_ready_first_and_refuses_later() -> None:
    engine = ScriptedRemoteEngine(automatic=False)
    async with operated(engine) as gateway:
        running = asyncio.create_task(gateway.ask())
        await engine.wait_for(lambda: bool(engine.contexts))
        drained = await gateway.admin("/drain")
        assert drained["drained"]
        assert 29 < drained["refuses_in_s"] <= 30
        assert drained["running"] == 1
        assert await gateway.readiness() == (503, "draining")
        assert "\nparrot_gateway_draining 1\n" in (await gateway.http.get("/metrics")).text
        engine.automatic = True
        engine.step()
        # A load balancer that has not noticed yet still gets answers.
        assert await gateway.ask() == await running == "Hello world"
        assert (await gateway.admin("/drain", {"refuse_after_s": None}))["refuses_in_s"] is None
        await gateway.admin("/drain", {"refuse_after_s": 0.001})
        await until(lambda: gateway.service.gate.describe_drain()["refuses_in_s"] == 0)
        with pytest.raises(openai.InternalServerError) as refused:
            await gateway.ask()
        assert (refused.value.status_code, refused.value.code) == (503, "drained")
        state = await gateway.http.get("/admin/v1/drain", headers=ADMIN)
        assert state.json() == {"drained": True, "refuses_in_s": 0.0, "running": 0}
        await gateway.admin("/undrain")
        assert await gateway.ask() == "Hello world"
        assert await gateway.readiness() == (200, "ok")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"refuse_after_s": -1}, "refuse_after_s"),
        ({"refuse_after_s": "soon"}, "refuse_after_s"),
        ({"refuse_after_s": 1e9}, "refuse_after_s"),
        ({"when": 1}, "when"),
    ],
)
async def test_bodies_that_say_something_else_change_nothing(
    body: dict[str, Any], field: str
) -> None:
    async with operated(ScriptedRemoteEngine()) as gateway:
        answer = await gateway.http.post("/admin/v1/drain", headers=ADMIN, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert await gateway.readiness() == (200, "ok")
