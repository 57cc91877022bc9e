"""`install()`: what clients of openai send inside of runs, to whom, and what wins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from harness.processes import GatewayProcess
from harness.scripted_upstream import (
    ScriptedUpstream,
    chat_document,
    chat_events,
    completion_document,
    document,
    error,
    event_stream,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_parrot.install import InstallError, install, uninstall

FIELDS = ("session", "run", "parent", "name", "group")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PARROT_BASE_URL", "OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    yield
    uninstall()


def _told(upstream: ScriptedUpstream, model: str) -> list[dict[str, str]]:
    """Return what came with each call of a model: the scripted server stands for the gateway."""
    return [
        {
            name: call.headers[f"x-parrot-{name}"]
            for name in FIELDS
            if f"x-parrot-{name}" in call.headers
        }
        for call in upstream.calls(model)
    ]


class Clients:
    """Both clients of one server, and what a program does with them in a run."""

    def __init__(self, base_url: str, **options: Any) -> None:
        self.sync = openai.OpenAI(base_url=base_url, api_key="none", **options)
        self.asynchronous = openai.AsyncOpenAI(base_url=base_url, api_key="none", **options)

    def run(self, how: str, model: str, config: Any = None, **options: Any) -> None:
        """One call within the run of a function."""
        asked: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": "Hi"}],
            **options,
        }

        def invoke(_: Any) -> None:
            answer = self.sync.chat.completions.create(stream="stream" in how, **asked)
            if "stream" in how:
                assert list(answer)

        async def ainvoke(_: Any) -> None:
            answer = await self.asynchronous.chat.completions.create(
                stream="stream" in how, **asked
            )
            if "stream" in how:
                assert [chunk async for chunk in answer]

        step = RunnableLambda(invoke, ainvoke, name="ask")
        if "async" in how:
            asyncio.run(step.ainvoke(None, config))
        else:
            step.invoke(None, config)


HOW = pytest.mark.parametrize("how", ["sync", "async", "sync stream", "async stream"])


def _answer(how: str) -> Any:
    return event_stream(*chat_events(["Hi"])) if "stream" in how else document(chat_document("Hi"))


@HOW
def test_a_call_inside_of_a_run_tells_of_it(upstream: ScriptedUpstream, how: str) -> None:
    install(upstream.base_url)
    model = upstream.script(_answer(how))
    Clients(upstream.base_url).run(how, model)
    (told,) = _told(upstream, model)
    assert told == {"session": told["session"], "parent": told["session"], "name": "ask"}


@HOW
def test_calls_to_other_servers_tell_nothing(upstream: ScriptedUpstream, how: str) -> None:
    install("http://127.0.0.1:1/v1")
    model = upstream.script(_answer(how))
    Clients(upstream.base_url).run(how, model)
    assert _told(upstream, model) == [{}]


def test_an_address_of_another_host_in_a_call_of_the_gateways_client_tells_nothing(
    upstream: ScriptedUpstream,
) -> None:
    install("http://127.0.0.1:1/v1")
    model = upstream.script(_answer("sync"))
    client = Clients("http://127.0.0.1:1/v1").sync
    url = f"{upstream.base_url}/chat/completions"
    body = {"model": model, "messages": []}
    RunnableLambda(lambda _: client.post(url, cast_to=object, body=body)).invoke(None)
    assert _told(upstream, model) == [{}]


def test_outside_of_runs_nothing_is_told(upstream: ScriptedUpstream) -> None:
    install(upstream.base_url)
    model = upstream.script(_answer("sync"))
    Clients(upstream.base_url).sync.chat.completions.create(model=model, messages=[])
    assert _told(upstream, model) == [{}]


@pytest.mark.parametrize("name", ["PARROT_BASE_URL", "OPENAI_BASE_URL", "OPENAI_API_BASE"])
def test_the_address_may_be_in_the_environment(
    upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, upstream.base_url + "/")
    install()
    model = upstream.script(_answer("sync"))
    Clients(upstream.base_url).run("sync", model)
    assert _told(upstream, model)[0]["name"] == "ask"


def test_headers_that_are_there_win(upstream: ScriptedUpstream) -> None:
    install(upstream.base_url)
    model = upstream.script(_answer("sync"))
    clients = Clients(upstream.base_url, default_headers={"X-Parrot-Session": "mine"})
    clients.run("sync", model, extra_headers={"x-parrot-name": "so called"})
    (told,) = _told(upstream, model)
    assert (told["session"], told["name"]) == ("mine", "so called")
    assert "parent" in told


def test_names_need_not_be_ascii(upstream: ScriptedUpstream) -> None:
    install(upstream.base_url)
    model = upstream.script(_answer("sync"))
    clients = Clients(upstream.base_url)
    for how in ("sync", "async"):
        clients.run(how, model, {"configurable": {"thread_id": "café"}})
    clients.run(
        "sync",
        model,
        {"configurable": {"thread_id": "café"}},
        extra_body={"parrot": {"session": "mine", "priority": 1}},
    )
    told = [call.json["parrot"] for call in upstream.calls(model)]
    assert told == [{"session": "café"}] * 2 + [{"session": "mine", "priority": 1}]


def test_every_attempt_of_a_call_tells_the_same(upstream: ScriptedUpstream) -> None:
    install(upstream.base_url)
    model = upstream.script(error(503, retry_after_ms="1"), _answer("sync"))
    Clients(upstream.base_url).run("sync", model)
    first, second = _told(upstream, model)
    assert first == second != {}


def test_uninstalled_and_installed_again(upstream: ScriptedUpstream) -> None:
    model = upstream.script(_answer("sync"))
    clients = Clients(upstream.base_url)
    ordinary = openai.OpenAI._prepare_options
    install(upstream.base_url)
    install(["http://127.0.0.1:1/v1", upstream.base_url])
    clients.run("sync", model)
    uninstall()
    assert openai.OpenAI._prepare_options is ordinary
    clients.run("sync", model)
    uninstall()
    install(upstream.base_url)
    clients.run("sync", model)
    assert [bool(told) for told in _told(upstream, model)] == [True, False, True]


@pytest.mark.parametrize(
    ("base_url", "message"),
    [(None, "PARROT_BASE_URL"), ("gateway", "no address"), ("http://h:x/v1", "no address")],
)
def test_bad_addresses(base_url: Any, message: str) -> None:
    ordinary = openai.OpenAI._prepare_options
    with pytest.raises(InstallError, match=message):
        install(base_url)
    assert openai.OpenAI._prepare_options is ordinary


@pytest.mark.parametrize("owner", ["OpenAI", "AsyncOpenAI"])
def test_a_client_that_has_changed_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    def changed(self: Any, options: Any, more: Any) -> Any:
        return options

    monkeypatch.setattr(getattr(openai, owner), "_prepare_options", changed)
    ordinary = openai.OpenAI._prepare_options, openai.AsyncOpenAI._prepare_options
    with pytest.raises(InstallError, match="ChatParrot"):
        install("http://127.0.0.1:1/v1")
    assert (openai.OpenAI._prepare_options, openai.AsyncOpenAI._prepare_options) == ordinary


# -- langchain-openai ------------------------------------------------------------------------


def _models() -> Any:
    return pytest.importorskip("langchain_openai")


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One for all: langchain-openai keeps connections beyond the loop that they belong to."""
    made = asyncio.new_event_loop()
    yield made
    made.close()


@HOW
def test_chat_models_tell_their_own_run(
    upstream: ScriptedUpstream, loop: asyncio.AbstractEventLoop, how: str
) -> None:
    install(upstream.base_url)
    model = upstream.script(_answer(how))
    chat = _models().ChatOpenAI(model=model, base_url=upstream.base_url, api_key="none")
    chain = ChatPromptTemplate.from_template("{x}") | chat | StrOutputParser()
    branches = RunnableParallel(a=chain, b=chain)

    async def stream() -> None:
        assert [chunk async for chunk in branches.astream({"x": "Hi"})]

    run: dict[str, Callable[[], Any]] = {
        "sync": lambda: branches.invoke({"x": "Hi"}),
        "async": lambda: loop.run_until_complete(branches.ainvoke({"x": "Hi"})),
        "sync stream": lambda: list(branches.stream({"x": "Hi"})),
        "async stream": lambda: loop.run_until_complete(stream()),
    }
    run[how]()
    one, other = _told(upstream, model)
    assert one["session"] == other["session"]
    assert one["group"] == other["group"]
    assert len({one["run"], other["run"], one["parent"], other["parent"], one["session"]}) == 5
    assert {one["name"], other["name"]} == {"a", "b"}


def test_text_models_too(upstream: ScriptedUpstream, loop: asyncio.AbstractEventLoop) -> None:
    install(upstream.base_url)
    model = upstream.script(document(completion_document()))
    llm = _models().OpenAI(model=model, base_url=upstream.base_url, api_key="none")
    llm.invoke("Hi")
    loop.run_until_complete(llm.ainvoke("Hi"))
    for told in _told(upstream, model):
        assert told == {"session": told["run"], "run": told["run"], "name": told["name"]}
        assert told["name"].startswith("test_text_models_too:")


def test_a_request_after_a_models_run_is_not_of_that_run(upstream: ScriptedUpstream) -> None:
    install(upstream.base_url)
    model = upstream.script(_answer("sync"))
    chat = _models().ChatOpenAI(model=model, base_url=upstream.base_url, api_key="none")
    client = Clients(upstream.base_url).sync

    def both(_: Any) -> None:
        chat.invoke("Hi")
        client.chat.completions.create(model=model, messages=[])

    RunnableLambda(both).invoke(None)
    first, second = _told(upstream, model)
    assert first["parent"] == second["parent"]
    assert "run" in first
    assert "run" not in second


def test_a_real_gateway_takes_it(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    install(relay.base_url)
    model = upstream.script(_answer("sync"))
    chat = _models().ChatOpenAI(model=model, base_url=relay.base_url, api_key="none")
    (chat | StrOutputParser() | chat.with_config(run_name="äh")).invoke(
        "Hi", {"configurable": {"thread_id": "installed"}}
    )
    chat.batch(["a", "b"], {"configurable": {"thread_id": "installed"}})
    graph = relay.get("/v1/sessions/installed/graph?format=json")
    first, second, *batch = graph["calls"]
    assert first["parent"] == second["parent"]
    assert second["name"] == "äh"
    assert len({call["group"] for call in batch}) == 1
    assert batch[0]["group"] is not None
