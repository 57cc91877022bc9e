"""Whole applications, deferred, on the demo model: their graphs, their waits, their texts."""

from __future__ import annotations

import asyncio
import itertools
import operator
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from harness.processes import GatewayProcess
from langchain_core.output_parsers import NumberedListOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_parrot import ChatParrot, JoinTexts, ParrotLLM, submit

_names = itertools.count()

DOCUMENTS = [
    "Once upon a time there was a little dog.",
    "Lily had a big red ball.",
    "The cat sat by the fire.",
    "Tom went to the park with his mom.",
]


@pytest.fixture(params=[ParrotLLM, ChatParrot])
def model(request: pytest.FixtureRequest, demo: GatewayProcess) -> Callable[..., Any]:
    """Makes a model of either kind; greedy, so that texts can be compared."""

    def make(**options: Any) -> Any:
        return request.param(
            model="parrot-demo",
            base_url=demo.base_url,
            api_key=demo.api_key,
            temperature=0,
            **{"max_tokens": 6, **options},
        )

    return make


def _thread() -> dict[str, Any]:
    return {"configurable": {"thread_id": f"app-{next(_names)}"}}


def _graph(demo: GatewayProcess, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of a session, as the gateway tells them."""
    session = config["configurable"]["thread_id"]
    calls: list[dict[str, Any]] = demo.get(f"/v1/sessions/{session}/graph?format=json")["calls"]
    return calls


def _run(chain: Runnable[Any, Any], given: Any, config: Any, how: str) -> Any:
    if how == "invoke":
        return chain.invoke(given, config)
    return asyncio.run(chain.ainvoke(given, config))


HOW = pytest.mark.parametrize("how", ["invoke", "ainvoke"])


def _five_steps(llm: Any) -> Runnable[Any, Any]:
    chain: Any = PromptTemplate.from_template("Tell a story of {text}") | llm | StrOutputParser()
    for verb in ("Go on with", "Turn round", "Shorten", "End"):
        chain = (
            chain
            | {"text": RunnablePassthrough()}
            | ChatPromptTemplate.from_template(verb + " this: {text}")
            | llm
            | StrOutputParser()
        )
    return chain  # type: ignore[no-any-return]


@HOW
def test_a_chain_of_five_waits_once(
    demo: GatewayProcess, model: Callable[..., Any], how: str
) -> None:
    config = _thread()
    text = _run(_five_steps(model(defer=True)), {"text": "a dog"}, config, how)
    calls = _graph(demo, config)
    assert [call["state"] for call in calls] == ["done"] * 5
    for before, after in itertools.pairwise(calls):
        assert after["inputs"] == [before["output"]]
    assert {call["group"] for call in calls} == {None}
    assert len({call["run"] for call in calls}) == 5
    assert len({call["parent"] for call in calls}) == 1
    assert text == _run(_five_steps(model()), {"text": "a dog"}, _thread(), how)


def _assert_map_reduce(calls: list[dict[str, Any]], width: int) -> None:
    """One task group, all of which feeds one consumer, and nothing else does."""
    groups = {call["group"] for call in calls} - {None}
    (reduce,) = (call for call in calls if call["inputs"])
    members = [call for call in calls if call is not reduce]
    assert len(members) == width
    assert {call["group"] for call in members} == groups
    assert len(groups) == 1
    assert reduce["group"] is None
    assert sorted(reduce["inputs"]) == sorted(call["output"] for call in members)
    assert {call["objective"] for call in members} == {"throughput"}


def _reduce(llm: Any) -> Any:
    join = {"texts": JoinTexts()}
    return join | PromptTemplate.from_template("Of all: {texts}") | llm | StrOutputParser()


def _map(llm: Any) -> Any:
    given = RunnableLambda(lambda document: {"document": document})
    return given | PromptTemplate.from_template("Sum up: {document}") | llm | StrOutputParser()


@HOW
def test_map_reduce_by_map(demo: GatewayProcess, model: Callable[..., Any], how: str) -> None:
    # What a call is for is deduced from what waits while it runs: long enough for the reader.
    config, llm = _thread(), model(defer=True, max_tokens=32)
    text = _run(_map(llm).map() | _reduce(llm), DOCUMENTS, config, how)
    _assert_map_reduce(_graph(demo, config), len(DOCUMENTS))
    ordinary = _map(model(max_tokens=32)).map() | _reduce(model(max_tokens=32))
    assert text == _run(ordinary, DOCUMENTS, _thread(), how)


def test_all_is_submitted_before_anything_can_run(
    demo: GatewayProcess, model: Callable[..., Any]
) -> None:
    config, llm = _thread(), model(defer=True)
    with demo.frozen_engines():
        text = submit(_map(llm).map() | _reduce(llm), DOCUMENTS, config)
        assert len(_graph(demo, config)) == len(DOCUMENTS) + 1
    assert len(str(text)) > 0
    _assert_map_reduce(_graph(demo, config), len(DOCUMENTS))


def test_what_is_submitted_in_another_run_joins_the_session_of_its_texts(
    demo: GatewayProcess, model: Callable[..., Any]
) -> None:
    llm = model()
    with demo.frozen_engines():
        summaries = [submit(_map(llm), document) for document in DOCUMENTS]
        text = submit(_reduce(llm), summaries)
    assert len(str(text)) > 0
    assert text.reference is not None
    variable = demo.get(f"/v1/variables/{text.reference[9:36]}")
    calls = demo.get(f"/v1/sessions/{variable['session']}/graph?format=json")["calls"]
    (reduce,) = (call for call in calls if call["inputs"])
    assert len(reduce["inputs"]) == len(DOCUMENTS)


def test_parallel_branches_and_one_that_needs_them(
    demo: GatewayProcess, model: Callable[..., Any]
) -> None:
    config, llm = _thread(), model(defer=True)

    def asked(text: str) -> Any:
        return PromptTemplate.from_template(text) | llm | StrOutputParser()

    chain = (
        RunnableParallel(hero=asked("Name one of {x}"), place=asked("Where is {x}"))
        | PromptTemplate.from_template("{hero} in {place}")
        | llm
        | StrOutputParser()
    )
    # What a call is for is deduced from what waits while it runs.
    with demo.frozen_engines():
        text = submit(chain, {"x": "them"}, config)
    assert len(str(text)) > 0
    calls = _graph(demo, config)
    _assert_map_reduce(calls, 2)
    assert {call["name"] for call in calls if call["group"]} == {"hero", "place"}


class _State(TypedDict):
    document: str
    texts: Annotated[list[str], operator.add]
    whole: str


@HOW
def test_a_fan_out_of_langgraph(demo: GatewayProcess, model: Callable[..., Any], how: str) -> None:
    graph = pytest.importorskip("langgraph.graph")
    types = pytest.importorskip("langgraph.types")
    config, llm = _thread(), model()

    builder = graph.StateGraph(_State)
    builder.add_node("read", lambda state: {"texts": [submit(_map(llm), state["document"])]})
    builder.add_node("write", lambda state: {"whole": submit(_reduce(llm), state["texts"])})
    builder.add_conditional_edges(
        graph.START,
        lambda _: [types.Send("read", {"document": document}) for document in DOCUMENTS],
        ["read"],
    )
    builder.add_edge("read", "write")
    final = _run(builder.compile(), {"texts": []}, config, how)
    assert not final["whole"].is_resolved
    assert len(str(final["whole"])) > 0
    calls = _graph(demo, config)
    assert {call["name"] for call in calls} == {"read", "write"}
    (reduce,) = (call for call in calls if call["name"] == "write")
    members = [call for call in calls if call is not reduce]
    assert len({call["group"] for call in members}) == 1
    assert reduce["group"] not in {call["group"] for call in members}
    assert sorted(reduce["inputs"]) == sorted(call["output"] for call in members)


def test_a_parser_in_the_middle_waits_there(
    demo: GatewayProcess, model: Callable[..., Any]
) -> None:
    config, llm = _thread(), model(defer=True)
    chain = (
        PromptTemplate.from_template("List {x}")
        | llm
        | NumberedListOutputParser()
        | RunnableLambda(lambda items: {"items": str(items)})
        | PromptTemplate.from_template("Of {items}")
        | llm
        | StrOutputParser()
    )
    assert len(chain.invoke({"x": "toys"}, config)) > 0
    assert [call["inputs"] for call in _graph(demo, config)] == [[], []]
