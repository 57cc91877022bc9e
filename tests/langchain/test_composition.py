"""Deferral inside LangChain's compositions: what is deferred, what is read where, what is not."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from harness.processes import GatewayProcess
from harness.scripted_model import MODEL, ScriptedModel
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import CommaSeparatedListOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.tools import tool
from langchain_parrot import ChatParrot, DeferredFailedError, JoinTexts, ParrotLLM, submit
from langchain_parrot.deferred import DeferredText

_sessions = itertools.count()
HOW = pytest.mark.parametrize("how", ["invoke", "ainvoke", "batch", "abatch", "stream", "astream"])


class Calls:
    """A session of a gateway: a model in it, and what the gateway knows of its calls."""

    def __init__(self, gateway: GatewayProcess, kind: Any = ChatParrot) -> None:
        self.gateway = gateway
        self.kind = kind
        self.session = f"composition-{next(_sessions)}"
        self.model = self.make()

    def make(self, **arguments: Any) -> Any:
        """Another model in the session."""
        connection = {"base_url": self.gateway.base_url, "api_key": self.gateway.api_key}
        return self.kind(
            **{"model": MODEL, "session": self.session, "defer": True, **connection, **arguments}
        )

    @property
    def edges(self) -> list[int]:
        """Count the references that each call was given, in order of submission."""
        graph = self.gateway.get(f"/v1/sessions/{self.session}/graph?format=json")
        return [len(call["inputs"]) for call in graph["calls"]]


@pytest.fixture(params=[ChatParrot, ParrotLLM])
def calls(request: pytest.FixtureRequest, gateway: GatewayProcess) -> Calls:
    return Calls(gateway, request.param)


@pytest.fixture
def chats(gateway: GatewayProcess) -> Calls:
    return Calls(gateway)


async def _run(chain: Runnable[Any, Any], given: Any, how: str) -> Any:
    """The result of one input, whatever the way to run it."""
    if how == "invoke":
        return await asyncio.to_thread(chain.invoke, given)
    if how == "ainvoke":
        return await chain.ainvoke(given)
    if how == "batch":
        return (await asyncio.to_thread(chain.batch, [given]))[0]
    if how == "abatch":
        return (await chain.abatch([given]))[0]
    if how == "stream":
        chunks = await asyncio.to_thread(lambda: list(chain.stream(given)))
    else:
        chunks = [chunk async for chunk in chain.astream(given)]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


def _ask(model: Any, template: str) -> Any:
    return PromptTemplate.from_template(template) | model | StrOutputParser()


def _assert_text(value: Any) -> None:
    assert isinstance(value, str)
    assert type(value) is not DeferredText
    assert "[[parrot" not in value


@HOW
async def test_a_text_that_only_goes_into_a_prompt_is_not_waited_for(
    calls: Calls, how: str
) -> None:
    chain = _ask(calls.model, "tell of {x}") | {"y": RunnablePassthrough()}
    text = await _run(chain | _ask(calls.model, "now {y}"), {"x": "rain"}, how)
    _assert_text(text)
    assert calls.edges == [0, 1]
    plain = calls.make(defer=False)
    other = _ask(plain, "tell of {x}") | {"y": RunnablePassthrough()} | _ask(plain, "now {y}")
    assert text == await _run(other, {"x": "rain"}, how)


@HOW
async def test_what_is_passed_on_to_the_end_is_read_there(calls: Calls, how: str) -> None:
    chain = RunnablePassthrough.assign(story=_ask(calls.model, "S {x}")) | (
        RunnablePassthrough.assign(end=_ask(calls.model, "E {story}"))
    )
    answer = await _run(chain, {"x": "fox"}, how)
    assert answer.keys() == {"x", "story", "end"}
    for value in answer.values():
        _assert_text(value)
    assert calls.edges == [0, 1]


@HOW
async def test_map_and_reduce_wait_once(calls: Calls, how: str) -> None:
    reduce = {"texts": JoinTexts(separator=" + ")} | _ask(calls.model, "all: {texts}")
    text = await _run(_ask(calls.model, "{d}").map() | reduce, [{"d": "a"}, {"d": "b"}], how)
    _assert_text(text)
    assert sorted(calls.edges) == [0, 0, 2]


#: Steps between two calls that read the text.
READERS: list[Callable[[], Any]] = [
    lambda: RunnableLambda(lambda text: {"y": text.upper()}),
    lambda: RunnableLambda(lambda text: {"y": re.sub(r"\W", "", text)}),
    lambda: RunnableLambda(lambda text: {"y": json.loads(json.dumps(text))}),
    lambda: CommaSeparatedListOutputParser() | RunnableLambda(lambda items: {"y": items[0]}),
    lambda: twice | RunnableLambda(lambda text: {"y": text}),
    lambda: Shout() | {"y": RunnablePassthrough()},
    lambda: RunnablePassthrough(func=lambda text: None) | {"y": RunnablePassthrough()},
    lambda: {"y": RunnableLambda(lambda text: text[:3])},
    lambda: RunnableLambda(lambda text: text).with_retry() | {"y": RunnablePassthrough()},
]


@tool
def twice(text: str) -> str:
    """The text twice."""
    assert "[[parrot" not in text
    return text * 2


class Shout(Runnable[Any, Any]):
    """A runnable of a user's own."""

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        return str(input).upper()


@HOW
@pytest.mark.parametrize("number", range(len(READERS)))
async def test_a_step_that_reads_gets_the_text(chats: Calls, number: int, how: str) -> None:
    def chain(model: Any) -> Any:
        return _ask(model, "one, {x}") | READERS[number]() | _ask(model, "two {y}")

    text = await _run(chain(chats.model), {"x": "rain"}, how)
    _assert_text(text)
    assert chats.edges == [0, 0]
    assert text == await _run(chain(chats.make(defer=False)), {"x": "rain"}, how)


@HOW
async def test_a_text_that_is_read_and_passed_on_is_right_in_both(chats: Calls, how: str) -> None:
    chain = (
        _ask(chats.model, "of {x}")
        | RunnableParallel(
            length=RunnableLambda(len), loud=RunnableLambda(str.upper), text=RunnablePassthrough()
        )
        | RunnablePassthrough.assign(next=_ask(chats.model, "go on {text}"))
    )
    answer = await _run(chain, {"x": "rain"}, how)
    assert answer["length"] == len(answer["text"])
    assert answer["loud"] == answer["text"].upper()
    for name in ("text", "loud", "next"):
        _assert_text(answer[name])


TEMPLATES = [
    PromptTemplate.from_template("now {{ y }}", template_format="mustache"),
    PromptTemplate.from_template("now {y!s}"),
    PromptTemplate.from_template("now {y:.5}"),
]


@pytest.mark.parametrize("number", range(len(TEMPLATES)))
def test_templates_that_look_at_what_they_put_in_get_the_text(chats: Calls, number: int) -> None:
    chain = _ask(chats.model, "of {x}") | {"y": RunnablePassthrough()} | TEMPLATES[number]
    text = (chain | chats.model | StrOutputParser()).invoke({"x": "rain"})
    _assert_text(text)
    assert chats.edges == [0, 0]


def test_messages_of_before_go_on_as_references(chats: Calls, scripted: ScriptedModel) -> None:
    first = ChatPromptTemplate.from_template("hello {x}") | chats.model
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("user", "and?")])
    chain = {"history": first | RunnableLambda(lambda message: [message])} | prompt | chats.model
    assert chain.invoke({"x": "you"}).content == "You said: and?"
    assert scripted.bodies[-1]["messages"][0]["content"] == "You said: hello you"


def test_a_condition_reads_and_its_branch_does_not(chats: Calls) -> None:
    branch = RunnableBranch(
        (lambda given: "rain" in given["y"], _ask(chats.model, "wet {y}")),
        _ask(chats.model, "dry {y}"),
    )
    chain = _ask(chats.model, "of {x}") | {"y": RunnablePassthrough()} | branch
    assert chain.invoke({"x": "rain"}) == "You said: wet You said: of rain"
    assert chats.edges == [0, 1]


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
async def test_a_call_by_itself_answers_with_its_text(calls: Calls, how: str) -> None:
    answer = await _run(calls.model, "hello", how)
    text = answer.content if isinstance(answer, AIMessage) else answer
    _assert_text(text)
    if isinstance(answer, AIMessage):
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] > 0


def test_a_call_in_a_lambda_answers_with_its_text(chats: Calls) -> None:
    seen: list[Any] = []
    nested = _ask(chats.model, "{x}") | {"y": RunnablePassthrough()} | _ask(chats.model, "{y}")

    def run(x: str) -> str:
        seen.append(nested.invoke({"x": x}))
        return str(seen[-1])

    (RunnableLambda(run) | (lambda text: text)).invoke("rain")
    _assert_text(seen[0])
    # The chain in it is a composition of its own.
    assert chats.edges == [0, 1]


def test_callbacks_see_texts_and_usage(chats: Calls) -> None:
    class Seen(BaseCallbackHandler):
        def __init__(self) -> None:
            self.values: list[str] = []

        def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
            self.values.append(repr(messages))

        def on_llm_end(self, response: Any, **_: Any) -> None:
            self.values.append(repr(response))

        def on_chain_start(self, serialized: Any, inputs: Any, **_: Any) -> None:
            self.values.append(repr(inputs))

        def on_chain_end(self, outputs: Any, **_: Any) -> None:
            self.values.append(repr(outputs))

    seen, usage = Seen(), UsageMetadataCallbackHandler()
    chain = _ask(chats.model, "{x}") | {"y": RunnablePassthrough()} | _ask(chats.model, "{y}")
    _assert_text(chain.invoke({"x": "rain"}, {"callbacks": [seen, usage]}))
    assert seen.values
    for value in seen.values:
        assert "[[parrot" not in value
    assert sum(counts["output_tokens"] for counts in usage.usage_metadata.values()) > 0
    assert chats.edges == [0, 0]


async def test_events_show_texts(chats: Calls) -> None:
    chain = _ask(chats.model, "{x}") | {"y": RunnablePassthrough()} | _ask(chats.model, "{y}")
    events = [repr(event) async for event in chain.astream_events({"x": "rain"})]
    assert events
    assert not any("[[parrot" in event for event in events)


def test_tools_are_called_although_the_model_defers(chats: Calls) -> None:
    chain = (
        PromptTemplate.from_template("use twice on {x}")
        | chats.model.bind_tools([twice])
        | RunnablePassthrough()
    )
    message = chain.invoke({"x": "rain"})
    assert [call["name"] for call in message.tool_calls] == ["twice"]
    assert submit(chats.model, "and") == "You said: and"


def test_a_fallback_sees_the_failure(chats: Calls) -> None:
    bad = chats.make(objective="nonsense")
    safe = (_ask(bad, "{x}")).with_fallbacks([_ask(chats.model, "instead {x}")])
    chain = safe | {"y": RunnablePassthrough()} | _ask(chats.model, "then {y}")
    assert chain.invoke({"x": "rain"}) == "You said: then You said: instead rain"


def test_a_cache_keeps_texts(gateway: GatewayProcess) -> None:
    cache = InMemoryCache()
    calls = Calls(gateway)
    model = calls.make(cache=cache)
    chain = _ask(model, "{x}") | {"y": RunnablePassthrough()} | _ask(model, "then {y}")
    assert chain.invoke({"x": "rain"}) == chain.invoke({"x": "rain"})
    assert len(calls.edges) == 2
    assert "[[parrot" not in repr(cache.__dict__)


def test_a_failure_is_raised_by_the_chain(chats: Calls) -> None:
    bad = chats.make(transform="json(/no)")
    chain = _ask(bad, "{x}") | {"y": RunnablePassthrough()} | _ask(chats.model, "then {y}")
    with pytest.raises(DeferredFailedError):
        chain.invoke({"x": "rain"})
    (failed,) = chain.batch([{"x": "rain"}], return_exceptions=True)
    assert isinstance(failed, DeferredFailedError)


def test_models_of_two_gateways_wait_for_each_other(chats: Calls) -> None:
    other = chats.make(default_headers={}, api_key="another-key", max_retries=0)
    chain = _ask(chats.model, "{x}") | {"y": RunnablePassthrough()} | _ask(other, "then {y}")
    with pytest.raises(Exception, match="key"):
        chain.invoke({"x": "rain"})
    # The first call answered with its text: what one key's session holds, another has not.
    assert chats.edges == [0]
    graph = chats.gateway.get(f"/v1/sessions/{chats.session}/graph?format=json")
    assert graph["calls"][0]["state"] == "done"


def test_submitted_texts_go_into_the_next_call(calls: Calls) -> None:
    ask = _ask(calls.model, "then {x}")
    text: Any = "rain"
    for _ in range(3):
        text = submit(ask, {"x": text})
    assert type(text) is DeferredText
    assert not text.is_resolved
    expected = "rain"
    for _ in range(3):
        expected = _ask(calls.make(defer=False), "then {x}").invoke({"x": expected})
    assert str(text) == expected
    assert calls.edges[:3] == [0, 1, 1]


def test_a_deferred_text_as_the_input_of_a_chain(chats: Calls) -> None:
    text = submit(chats.model, "rain")
    assert (_ask(chats.model, "then {x}")).invoke({"x": text}) == "You said: then You said: rain"
    assert not text.is_resolved
    assert chats.edges == [0, 1]
    # Of one that reads, or with callbacks, it is the text.
    loud = RunnableLambda(lambda given: given["x"].upper()) | RunnablePassthrough()
    assert loud.invoke({"x": text}) == "YOU SAID: RAIN"
    observed = _ask(chats.model, "then {x}").invoke(
        {"x": submit(chats.model, "snow")}, {"callbacks": [BaseCallbackHandler()]}
    )
    assert observed == "You said: then You said: snow"


def test_what_ends_in_no_text_cannot_be_submitted(chats: Calls) -> None:
    with pytest.raises(TypeError, match="end in a text"):
        submit(RunnableParallel(a=_ask(chats.model, "{x}")), {"x": "rain"})
