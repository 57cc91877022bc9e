"""Settings exchanged while calls run: whole or not at all, and no call notices."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.scripted_upstream import Answer, ScriptedUpstream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parrot_gateway.server.reload import LIVE, SettingsReloader, fields_of
from parrot_gateway.settings.config_file import ConfigFile
from parrot_gateway.settings.model import Settings, UpstreamSettings
from parrot_gateway.settings.sources import SettingsSources

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
ADMIN = {"Authorization": "Bearer the-admin-key"}
SLOW = {"x-fake": "chunks=30,delay_ms=3,key=slow"}
HELLO: Any = [{"role": "user", "content": "Hello"}]


class Configured:
    """A served gateway before scripted upstreams, and its operator."""

    def __init__(
        self, service: Service, http: httpx.AsyncClient, fakes: list[ScriptedUpstream]
    ) -> None:
        self.service = service
        self.http = http
        self.fakes = fakes
        self.client = service.client()

    async def get(self) -> tuple[dict[str, Any], str]:
        """The settings that can be sent back, and their tag."""
        answer = await self.http.get("/admin/v1/config", headers=ADMIN)
        assert answer.status_code == 200, answer.text
        return answer.json()["settings"], answer.headers["etag"]

    async def put(self, settings: Any, tag: str = "*") -> httpx.Response:
        body = settings if isinstance(settings, (str, bytes)) else json.dumps(settings)
        return await self.http.put(
            "/admin/v1/config", headers={**ADMIN, "If-Match": tag}, content=body
        )

    async def change(self, **sections: Any) -> list[str]:
        """Exchange sections; names of what has changed."""
        settings, tag = await self.get()
        for name, value in sections.items():
            settings[name] = {**settings[name], **value} if name == "server" else value
        answer = await self.put(settings, tag)
        assert answer.status_code == 200, answer.text
        changed: list[str] = answer.json()["changed"]
        return changed

    async def ask(self, model: str) -> tuple[str, str]:
        """Return the upstream's server that answered a chat, and the model it was asked for."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model=model, messages=HELLO
        )
        return raw.headers["x-parrot-engine"], raw.parse().model

    def upstream(self, name: str, number: int, **more: Any) -> dict[str, Any]:
        """An entry for one of the scripted servers."""
        return {"name": name, "url": self.fakes[number].base_url, "models": "*", **more}


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARROT_ADMIN_KEY", "the-admin-key")
    monkeypatch.setenv("UP_KEY", "key-of-the-upstream")
    monkeypatch.setenv("OTHER_KEY", "another-key")
    monkeypatch.setenv("NEXT_ADMIN_KEY", "the-next-admin-key")


@asynccontextmanager
async def configured(count: int = 2, *, api_key: str | None = None) -> AsyncIterator[Configured]:
    fakes = [ScriptedUpstream() for _ in range(count)]
    async with AsyncExitStack() as stack:
        for fake in fakes:
            stack.enter_context(fake)
        upstream = UpstreamSettings(
            name="up", url=fakes[0].base_url, models=["a"],
            api_key="env:UP_KEY",
        )  # fmt: skip
        url = fakes[0].base_url.replace("//", "//bob:hunter2@")
        hidden = UpstreamSettings(name="hidden", url=url, models=[])
        service = await stack.enter_async_context(
            serving(
                ScriptedRemoteEngine(), upstreams=[upstream, hidden], server={"api_key": api_key}
            )
        )
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=service.root, timeout=60))
        await service.gateway.upstreams.start()
        stack.push_async_callback(service.gateway.upstreams.close)
        yield Configured(service, http, fakes)


async def test_what_is_shown_holds_no_secret_and_can_be_sent_back() -> None:
    async with configured() as gateway:
        answer = await gateway.http.get("/admin/v1/config", headers=ADMIN)
        assert "hunter2" not in answer.text
        assert "key-of-the-upstream" not in answer.text
        shown = answer.json()
        assert "***@127.0.0.1" in shown["settings"]["upstreams"][1]["url"]
        assert shown["settings"]["upstreams"][0]["api_key"] == "env:UP_KEY"
        assert shown["reload"]["server.port"] == "restart"
        assert shown["reload"]["aliases"] == "live"
        assert set(shown["reload"]) == set(fields_of(Settings()))
        same = await gateway.put(shown["settings"], answer.headers["etag"])
        assert (same.status_code, same.json()["changed"]) == (200, [])
        assert same.headers["etag"] == answer.headers["etag"]
        assert "hunter2" in gateway.service.gateway.settings.upstreams[1].url
        assert (await gateway.http.get("/admin/v1/config")).status_code == 401


async def test_running_calls_end_where_they_began_and_new_ones_go_by_the_new() -> None:
    async with configured() as gateway:
        stream = await gateway.client.chat.completions.create(
            model="a", messages=HELLO, stream=True, extra_headers=SLOW
        )
        first = await anext(aiter(stream))
        settings, tag = await gateway.get()
        settings["upstreams"] = [gateway.upstream("up", 1, models=["a"], api_key="env:OTHER_KEY")]
        settings["aliases"] = {"gpt": "a"}
        changed = await gateway.put(yaml.safe_dump(settings), tag)
        assert changed.json()["changed"] == ["upstreams", "aliases"]
        assert changed.json()["origins"]["aliases"].startswith("request body, line ")
        assert await gateway.ask("gpt") == ("up", "a")
        (record,) = [each for each in gateway.fakes[1].received if each.method == "POST"]
        assert record.headers.get("authorization") == "Bearer another-key"
        chunks = [first, *[chunk async for chunk in stream]]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert (await gateway.fakes[0].wait_for("slow", ended="complete")).target


async def test_calls_at_any_moment_see_one_set_of_settings_whole() -> None:
    async with configured() as gateway:
        sets = [
            {
                "upstreams": [gateway.upstream("one", 0), gateway.upstream("other", 1)],
                "aliases": {"x": f"{name}/model-of-{name}"},
            }
            for name in ("one", "other")
        ]
        sets.append({**sets[1], "upstreams": [gateway.upstream("other", 0)]})
        await gateway.change(**sets[0])
        seen, done = set(), asyncio.Event()

        async def call() -> None:
            while not done.is_set():
                seen.add(await gateway.ask("x"))

        callers = [asyncio.create_task(call()) for _ in range(4)]
        for number in range(6):
            await gateway.change(**sets[number % 3])
        done.set()
        # The client raises where a call fails.
        await asyncio.gather(*callers)
        assert seen == {("one", "model-of-one"), ("other", "model-of-other")}


async def test_what_cannot_be_taken_over_changes_nothing() -> None:
    async with configured() as gateway:
        settings, tag = await gateway.get()
        wrong: list[tuple[Any, int, str, str | None]] = [
            ({"server": {"port": 1}}, 409, "restart_required", "server.port"),
            # There is no such module: what comes over the network is never imported.
            ({"scheduler": {"policy": "no.m:P"}}, 409, "restart_required", "scheduler.policy"),
            ({"models": [{"model": "parrot-demo"}]}, 409, "restart_required", "models"),
            ({"engines": {"max_models": 2}}, 409, "restart_required", "engines.max_models"),
            ({"server": {"access_log": True}}, 409, "restart_required", "server.access_log"),
            ({"server": {"prot": 1}}, 400, "invalid_settings", "server.prot"),
            ({"aliases": 7}, 400, "invalid_settings", "aliases"),
            ({"server": {"admin_key": "env:NOT_SET_ANYWHERE"}}, 400, "invalid_settings", None),
            (
                {"upstreams": [gateway.upstream("up", 1, api_key="file:/etc/hostname")]},
                403,
                "file_only",
                "api_key",
            ),
            (
                {"upstreams": [gateway.upstream("up", 1, api_key="env:NOT_SET_ANYWHERE")]},
                400, "invalid_settings", None,
            ),
        ]  # fmt: skip
        for sections, status, code, param in wrong:
            body = {**settings, "aliases": {"new": "a"}}
            for name, value in sections.items():
                merges = isinstance(value, dict) and name != "aliases"
                body[name] = {**body[name], **value} if merges else value
            answer = await gateway.put(body, tag)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
        for text in ("server: [", "- 1", "\x00", "a: &a [*a]", "[" * 1500, b"\xff\xfe"):
            answer = await gateway.put(text, tag)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_settings")
        assert await gateway.get() == (settings, tag)
        assert "new" not in {model.id for model in (await gateway.client.models.list()).data}
        assert await gateway.ask("a") == ("up", "a")


async def test_two_operators_do_not_overwrite_each_other() -> None:
    async with configured() as gateway:
        settings, tag = await gateway.get()
        first, second = {**settings, "aliases": {"x": "a"}}, {**settings, "aliases": {"y": "a"}}
        answers = await asyncio.gather(gateway.put(first, tag), gateway.put(second, tag))
        assert sorted(answer.status_code for answer in answers) == [200, 412]
        lost = next(answer.json()["error"] for answer in answers if answer.status_code == 412)
        assert lost["code"] == "settings_changed"
        answer = await gateway.http.put("/admin/v1/config", headers=ADMIN, json=settings)
        assert (answer.status_code, answer.json()["error"]["code"]) == (428, "if_match_required")
        assert (await gateway.put(settings)).json()["changed"] == ["aliases"]


async def test_upstreams_of_several_servers_are_exchanged() -> None:
    async with configured(3) as gateway:

        def fleet(*numbers: int) -> list[dict[str, Any]]:
            urls = [gateway.fakes[number].base_url for number in numbers]
            return [{"name": "fleet", "urls": urls, "models": ["b"], "max_concurrency": 1}]

        await gateway.change(upstreams=fleet(0, 1))
        for name in ("fleet-1", "fleet-2"):
            await gateway.http.post(f"/admin/v1/engines/{name}/drain", headers=ADMIN)
        await gateway.http.post("/admin/v1/engines/fleet-1/undrain", headers=ADMIN)
        stream = await gateway.client.chat.completions.create(
            model="b", messages=HELLO, stream=True, extra_headers=SLOW
        )
        waiting = asyncio.create_task(gateway.ask("b"))
        await gateway.service.gateway.upstreams["fleet"].upstreams()[0].wait_ready()  # type: ignore[union-attr]
        await gateway.change(upstreams=fleet(1, 2))
        # Still drained, by its name; what waited has a place on the others.
        listed = (await gateway.http.get("/admin/v1/engines", headers=ADMIN)).json()["data"]
        drained = {each["name"]: each["drained"] for each in listed if each["model"] == "fleet"}
        assert drained == {"fleet-1": False, "fleet-2": True}
        assert (await waiting)[0] == "fleet-1"
        assert await gateway.ask("b") == ("fleet-1", "b")
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "stop"
        assert (await gateway.fakes[0].wait_for("slow", ended="complete")).target
        await gateway.change(upstreams=[gateway.upstream("fleet", 2, models=["b"])])
        assert await gateway.ask("b") == ("fleet", "b")
        await gateway.change(upstreams=fleet(0, 1))
        assert (await gateway.ask("b"))[0].startswith("fleet-")


async def test_the_log_level_changes() -> None:
    async with configured() as gateway:
        level = logging.getLogger().level
        try:
            assert await gateway.change(server={"log_level": "error"}) == ["server.log_level"]
            assert logging.getLogger().level == logging.ERROR
        finally:
            logging.getLogger().setLevel(level)


async def test_callers_and_the_operator_get_other_keys() -> None:
    async with configured(api_key="env:UP_KEY") as gateway:
        changed = await gateway.change(
            server={"api_key": "env:OTHER_KEY", "admin_key": "env:NEXT_ADMIN_KEY"}
        )
        assert changed == ["server.api_key", "server.admin_key"]

        async def status(path: str, key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return (await gateway.http.get(path, headers=headers)).status_code

        for path, old, new in (
            ("/v1/models", "key-of-the-upstream", "another-key"),
            ("/metrics", "key-of-the-upstream", "another-key"),
            ("/metrics", "the-admin-key", "the-next-admin-key"),
            ("/admin/v1/config", "the-admin-key", "the-next-admin-key"),
            ("/ui/api/overview", "the-admin-key", "the-next-admin-key"),
        ):
            assert (await status(path, old), await status(path, new)) == (401, 200), path


async def test_the_key_of_calls_is_no_admin_key() -> None:
    async with configured(api_key="env:UP_KEY") as gateway:
        settings, tag = await gateway.get()
        server = {**settings["server"], "admin_key": "env:UP_KEY"}
        answer = await gateway.put({**settings, "server": server, "aliases": {"new": "a"}}, tag)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_settings")
        assert "server.admin_key is the key of calls too" in answer.json()["error"]["message"]
        assert await gateway.get() == (settings, tag)


async def test_a_first_key_and_no_key_any_more_take_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with configured() as gateway:
        settings, tag = await gateway.get()
        server = {**settings["server"], "api_key": "env:OTHER_KEY"}
        first = await gateway.put({**settings, "server": server}, tag)
        monkeypatch.delenv("PARROT_ADMIN_KEY")
        last = await gateway.put(settings, tag)
        for answer, name in ((first, "server.api_key"), (last, "server.admin_key")):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (409, "restart_required")
            assert error["param"] == name
        assert (await gateway.http.get("/v1/models")).status_code == 200


async def test_a_refused_reload_leaves_no_upstream_behind() -> None:
    """A new upstream's key is wrong, or the request ends while another lists its models."""
    async with configured(3) as gateway:
        silent = gateway.fakes[2]
        silent.answer_all(Answer(bare=True, stall=True))
        settings, tag = await gateway.get()
        new = {"name": "new", "url": silent.base_url}
        bad = gateway.upstream("bad", 1, api_key="env:NOT_SET_ANYWHERE")
        answer = await gateway.put({**settings, "upstreams": [new, bad]}, tag)
        assert answer.status_code == 400
        assert not silent.received

        reloader = SettingsReloader(gateway.service.gateway, SettingsSources(ConfigFile.empty()))
        body = json.dumps({**settings, "upstreams": [new]}).encode()
        request = asyncio.create_task(reloader.put(body, tag))
        await silent.wait_for("", ended="running")
        request.cancel()
        await silent.wait_for("", ended="aborted")
        with pytest.raises(asyncio.CancelledError):
            await request
        assert await gateway.get() == (settings, tag)
        assert await gateway.ask("a") == ("up", "a")


def test_the_documents_name_what_is_taken_over() -> None:
    text = OPERATIONS.read_text(encoding="utf-8")
    table = text[text.index("### What is taken over") :]
    rows = re.findall(r"^\| `([\w.]+)` \|", table[: table.index("\n## ")], re.MULTILINE)
    assert sorted(rows) == sorted(LIVE)
    assert set(fields_of(Settings())) >= LIVE


#: Upstreams by name, with the scripted servers that they have.
_UPSTREAMS = st.dictionaries(
    st.sampled_from(["one", "two", "three"]),
    st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True),
    min_size=1,
)
_FAULTS = st.sampled_from(
    [
        ({"server": {"prot": 1}}, 400, "server.prot"),
        ({"server": {"port": 1}}, 409, "server.port"),
        ({"upstreams": [{"name": "one", "url": "http://a/v1", "models": 5}]}, 400,
         "upstreams.0.models"),
        ({"linking": {"enabled": False}}, 409, "linking.enabled"),
        ({"models": ["parrot-demo"]}, 409, "models"),
    ]
)  # fmt: skip
_STEPS = st.lists(
    st.tuples(st.just("put"), _UPSTREAMS)
    | st.tuples(st.just("both"), _UPSTREAMS, _UPSTREAMS)
    | st.tuples(st.just("wrong"), _FAULTS),
    min_size=4,
    max_size=8,
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_STEPS)
def test_any_sequence_of_settings_loses_no_call(steps: list[Any]) -> None:
    asyncio.run(_exchange(steps))


async def _exchange(steps: list[Any]) -> None:
    """Exchange settings again and again, under calls and streams to an alias of them all."""
    async with configured(3) as gateway:
        done = asyncio.Event()

        def sections(upstreams: dict[str, list[int]]) -> dict[str, Any]:
            entries = [
                {
                    "name": name,
                    "urls": [gateway.fakes[each].base_url for each in numbers],
                    "models": "*",
                }
                for name, numbers in upstreams.items()
            ]
            return {"upstreams": entries, "aliases": {"x": f"{min(upstreams)}/fake"}}

        async def call() -> None:
            while not done.is_set():
                await gateway.ask("x")

        async def stream() -> None:
            while not done.is_set():
                chunks = await gateway.client.chat.completions.create(
                    model="x", messages=HELLO, stream=True, extra_headers=SLOW
                )
                assert [each async for each in chunks][-1].choices[0].finish_reason == "stop"

        async def check(upstreams: dict[str, list[int]]) -> None:
            """Settings, health and metrics tell of these upstreams alone."""
            shown, _ = await gateway.get()
            assert [each["urls"] for each in shown["upstreams"]] == [
                each["urls"] for each in sections(upstreams)["upstreams"]
            ]
            health = (await gateway.http.get("/health")).json()
            assert [each["name"] for each in health["upstreams"]] == list(upstreams)
            page = (await gateway.http.get("/metrics")).text
            told = set(
                re.findall(r'^parrot_upstream_requests_running\{upstream="([^"]+)"', page, re.M)
            )
            assert told == {
                name if len(numbers) == 1 else f"{name}-{number + 1}"
                for name, numbers in upstreams.items()
                for number in range(len(numbers))
            }

        now: dict[str, list[int]] = {"one": [0]}
        await gateway.change(**sections(now))
        clients = [asyncio.create_task(work()) for work in (call, call, stream, stream)]
        for kind, *values in steps:
            settings, tag = await gateway.get()
            if kind == "wrong":
                ((given_sections, status, param),) = values
                body = {**settings, **sections({"two": [1]})}
                for name, value in given_sections.items():
                    is_section = isinstance(value, dict)
                    body[name] = {**body[name], **value} if is_section else value
                answer = await gateway.put(body, tag)
                assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
            else:
                bodies = [{**settings, **sections(each)} for each in values]
                answers = await asyncio.gather(*(gateway.put(each, tag) for each in bodies))
                taken = [each.status_code == 200 for each in answers]
                # Of two at once the second finds others' settings, unless they are the same.
                assert taken[0] or taken[-1], answers[0].text
                now = values[taken.index(True)]
                assert all(each.status_code in (200, 412) for each in answers)
            await check(now)
        done.set()
        # Those that fail raise here.
        await asyncio.gather(*clients)
