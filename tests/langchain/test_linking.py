"""Sessions, parents, names and groups of calls, as the run tree gives them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.tools import tool
from langchain_parrot.linking import RunTree, fields_of_run, run_tree
from pydantic import Field

Fields = dict[str, str]


class Told(BaseChatModel):
    """Remembers what is told of its calls, by the text of their prompt."""

    calls: dict[str, Fields] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "told"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> Any:
        prompt = str(messages[-1].content)
        assert prompt not in self.calls
        self.calls[prompt] = fields_of_run(run_manager)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=prompt + "."))])

    def groups(self) -> dict[str | None, set[str]]:
        """Prompts by group."""
        found: dict[str | None, set[str]] = {}
        for prompt, fields in self.calls.items():
            found.setdefault(fields.get("group"), set()).add(prompt)
        return found

    def all(self, field: str) -> list[str | None]:
        """One field of all calls."""
        return [fields.get(field) for fields in self.calls.values()]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert run_tree.num_runs == 0


@pytest.fixture(params=["sync", "async"])
def invoke(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`invoke`, or `ainvoke` in a loop of its own."""
    if request.param == "sync":
        return lambda chain, given, config=None: chain.invoke(given, config)
    return lambda chain, given, config=None: asyncio.run(chain.ainvoke(given, config))


def _batched(how: str) -> Callable[[Runnable[Any, Any], list[Any]], Any]:
    async def collect(results: Any) -> list[Any]:
        return [result async for result in results]

    return {
        "batch": lambda chain, inputs: chain.batch(inputs),
        "abatch": lambda chain, inputs: asyncio.run(chain.abatch(inputs)),
        "batch_as_completed": lambda chain, inputs: list(chain.batch_as_completed(inputs)),
        "abatch_as_completed": lambda chain, inputs: asyncio.run(
            collect(chain.abatch_as_completed(inputs))
        ),
    }[how]


BATCHES = pytest.mark.parametrize(
    "how", ["batch", "abatch", "batch_as_completed", "abatch_as_completed"]
)


def test_no_run_no_fields() -> None:
    assert fields_of_run(None) == {}


def test_a_call_alone_is_a_session(invoke: Callable[..., Any]) -> None:
    model = Told()
    invoke(model, "a")
    fields = model.calls["a"]
    assert fields == {"session": fields["run"], "run": fields["run"], "name": fields["name"]}


def test_a_chain_is_a_session_and_its_steps_are_no_group(invoke: Callable[..., Any]) -> None:
    model = Told()
    chain = ChatPromptTemplate.from_template("{x}") | model | StrOutputParser() | model
    invoke(chain, {"x": "a"})
    first, second = model.calls["a"], model.calls["a."]
    assert first["session"] == second["session"] == first["parent"] == second["parent"]
    assert first["run"] != second["run"]
    assert model.groups() == {None: {"a", "a."}}
    assert first["name"] == second["name"]


def test_other_runs_are_other_sessions(invoke: Callable[..., Any]) -> None:
    model = Told()
    invoke(model | StrOutputParser(), "a")
    invoke(model | StrOutputParser(), "b")
    assert model.calls["a"]["session"] != model.calls["b"]["session"]


def test_branches_are_one_group(invoke: Callable[..., Any]) -> None:
    model = Told()
    branches = {
        "x": RunnableLambda(lambda _: "x") | model,
        "y": RunnableLambda(lambda _: "y") | model,
        "z": RunnableLambda(lambda _: "z") | model | StrOutputParser() | model,
    }
    chain = RunnableParallel(branches) | RunnableLambda(lambda _: "end") | model
    invoke(chain, "go")
    assert len(set(model.all("session"))) == 1
    assert set(map(frozenset, model.groups().values())) == {
        frozenset({"x", "y", "z"}),
        frozenset({"z."}),
        frozenset({"end"}),
    }
    assert "group" not in model.calls["end"]
    assert [model.calls[name]["name"] for name in "xyz"] == ["x", "y", "z"]


def test_a_model_is_a_branch_itself(invoke: Callable[..., Any]) -> None:
    model, other = Told(), Told()
    invoke(RunnableParallel(x=model, y=other), "a")
    assert model.all("group") == other.all("group") != [None]


@BATCHES
def test_a_batch_is_one_group_in_one_session(how: str) -> None:
    model = Told()
    _batched(how)(model, ["a", "b", "c"])
    assert len(set(model.all("session"))) == 1
    assert len(set(model.all("run"))) == 3
    assert list(model.groups().values()) == [{"a", "b", "c"}]
    assert None not in model.groups()


@BATCHES
def test_a_batch_of_a_chain_is_a_group_for_each_stage(how: str) -> None:
    model = Told()
    chain = ChatPromptTemplate.from_template("{x}") | model | StrOutputParser() | model
    _batched(how)(chain, [{"x": "a"}, {"x": "b"}])
    assert len(set(model.all("session"))) == 1
    assert set(map(frozenset, model.groups().values())) == {
        frozenset({"a", "b"}),
        frozenset({"a.", "b."}),
    }


@BATCHES
def test_a_batch_of_one_is_nothing_special(how: str) -> None:
    model = Told()
    _batched(how)(model, ["a"])
    fields = dict(model.calls["a"])
    fields.pop("name", None)
    assert fields == dict.fromkeys(("session", "run"), fields["run"])


@BATCHES
def test_two_batches_are_two_groups(how: str) -> None:
    model = Told()
    _batched(how)(model, ["a", "b"])
    _batched(how)(model, ["c", "d"])
    assert set(map(frozenset, model.groups().values())) == {frozenset("ab"), frozenset("cd")}
    assert len(set(model.all("session"))) == 2


def test_a_batch_inside_a_chain_belongs_to_its_session(invoke: Callable[..., Any]) -> None:
    model = Told()

    def summarize(texts: list[str]) -> str:
        return "".join(message.content for message in model.batch(texts))

    invoke(RunnableLambda(summarize) | model, ["a", "b", "c"])
    assert len(set(model.all("session"))) == 1
    assert set(map(frozenset, model.groups().values())) == {frozenset("abc"), frozenset({"a.b.c."})}
    assert [model.calls[name].get("name") for name in "abc"] == ["summarize"] * 3


def test_a_mapped_chain_is_a_group(invoke: Callable[..., Any]) -> None:
    model = Told()
    invoke((model | StrOutputParser()).map() | "".join | model, ["a", "b"])
    assert set(map(frozenset, model.groups().values())) == {frozenset("ab"), frozenset({"a.b."})}
    assert len(set(model.all("session"))) == 1


def test_an_assignment_in_a_batch_does_not_hide_the_batch() -> None:
    model = Told()
    chain = RunnablePassthrough.assign(y=(lambda given: given["x"]) | model | StrOutputParser())
    chain.batch([{"x": "a"}, {"x": "b"}])
    assert list(model.groups().values()) == [{"a", "b"}]


def test_a_tool_in_a_chain_gives_its_name(invoke: Callable[..., Any]) -> None:
    model = Told()

    @tool
    def look_up(word: str) -> str:
        """Look a word up."""
        return str(model.invoke(word).content)

    invoke(RunnableLambda(lambda word: {"word": word}) | look_up, "a")
    assert model.calls["a"]["name"] == "look_up"
    assert model.calls["a"]["session"] != model.calls["a"]["parent"]


def test_a_name_of_the_users_wins(invoke: Callable[..., Any]) -> None:
    model = Told()
    chain = (model | StrOutputParser() | model.with_config(run_name="last")).with_config(
        run_name="both"
    )
    invoke(chain, "a")
    assert model.all("name") == ["both", "last"]


def test_a_thread_is_the_session(invoke: Callable[..., Any]) -> None:
    model = Told()
    config = {"configurable": {"thread_id": "t1"}}
    invoke(RunnableLambda(lambda text: text) | model, "a", config)
    invoke(RunnableLambda(lambda text: text) | model, "b", config)
    invoke(model, "c", {"metadata": {"thread_id": "t1"}})
    assert model.all("session") == ["t1"] * 3


@pytest.mark.parametrize("chain", [RunnableLambda(lambda text: text), StrOutputParser()])
def test_a_thread_is_the_session_of_a_batch(chain: Any) -> None:
    model = Told()
    config: Any = {"configurable": {"thread_id": "t1"}}
    (chain | model).batch(["a", "b"], config)
    model.batch(["c", "d"], [config, config])
    asyncio.run((chain | model).abatch(["e", "f"], config=config))
    assert model.all("session") == ["t1"] * 6


def test_a_call_that_refers_to_texts_leaves_its_session_to_them(invoke: Callable[..., Any]) -> None:
    model, reference = Told(), "[[parrot:v]]"
    invoke(RunnableLambda(lambda text: text) | model, reference)
    invoke(model, [("system", f"a {reference}"), ("user", "b")])
    invoke(model, [("user", [{"type": "text", "text": reference}])])
    assert model.all("session") == [None] * 3
    assert len(set(model.all("run"))) == 3
    config = {"configurable": {"thread_id": "t1"}}
    other = Told()
    invoke(RunnableLambda(lambda text: text) | other, reference, config)
    assert other.all("session") == ["t1"]


def test_calls_of_a_batch_of_a_thread_stay_in_it_whatever_they_refer_to() -> None:
    model = Told()
    chain = RunnableLambda(lambda text: text) | model
    prompts = ["[[parrot:v]] a", "[[parrot:v]] b"]
    chain.batch(prompts, {"configurable": {"thread_id": "t1"}})
    assert model.all("session") == ["t1"] * 2


@pytest.mark.parametrize(
    ("name", "sent"), [("n" * 300, "n" * 256), (" n ", "n"), ("two\nlines", None)]
)
def test_names_are_sent_as_a_gateway_takes_them(name: str, sent: str | None) -> None:
    model = Told()
    model.with_config(run_name=name).invoke("a", {"metadata": {"thread_id": name}})
    place = "test_names_are_sent_as_a_gateway_takes_them:"
    assert str(model.calls["a"]["name"]).startswith(sent or place)
    assert len(str(model.calls["a"]["name"])) == len(sent or model.calls["a"]["name"] or "")
    assert model.calls["a"]["session"] == (sent or model.calls["a"]["run"])


def test_streams_are_linked(invoke: Callable[..., Any]) -> None:
    model = Told()
    chain = RunnableParallel(x=RunnableLambda(lambda _: "x") | model, y=model) | RunnableLambda(str)
    assert "".join(chain.stream("y"))
    assert len(set(model.all("group"))) == 1
    assert len(set(model.all("session"))) == 1


def test_an_error_leaves_nothing_behind(invoke: Callable[..., Any]) -> None:
    def fail(_: Any) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        invoke(Told() | RunnableLambda(fail), "a")


# -- LangGraph ----------------------------------------------------------------------------


def _graph(model: Told, edges: list[tuple[str, str]], nodes: list[str]) -> Any:
    import operator
    from typing import Annotated, TypedDict

    graph = pytest.importorskip("langgraph.graph")
    state = TypedDict("state", {"said": Annotated[list[str], operator.add]})  # type: ignore[misc]  # noqa: UP013
    builder = graph.StateGraph(state)
    for name in nodes:
        builder.add_node(name, lambda state, name=name: {"said": [model.invoke(name).content]})
    for tail, head in edges:
        builder.add_edge(graph.START if tail == "start" else tail, head)
    return builder.compile()


def test_nodes_of_one_step_are_a_group_and_steps_are_not(invoke: Callable[..., Any]) -> None:
    model = Told()
    edges = [("start", "plan"), ("plan", "b"), ("plan", "c"), ("b", "end"), ("c", "end")]
    graph = _graph(model, edges, ["plan", "b", "c", "end"])
    invoke(graph, {"said": []}, {"configurable": {"thread_id": "t"}})
    assert model.all("session") == ["t"] * 4
    assert [fields["name"] for fields in model.calls.values()] == list(model.calls)
    assert set(map(frozenset, model.groups().values())) == {
        frozenset({"plan"}),
        frozenset("bc"),
        frozenset({"end"}),
    }


def test_sent_tasks_are_a_group(invoke: Callable[..., Any]) -> None:
    types = pytest.importorskip("langgraph.types")
    graph = pytest.importorskip("langgraph.graph")
    model = Told()
    inner = graph.StateGraph(dict)
    inner.add_node("draft", lambda given: {"x": model.invoke(given["x"]).content})
    inner.add_node("polish", lambda given: {"x": model.invoke(given["x"]).content})
    inner.add_edge(graph.START, "draft")
    inner.add_edge("draft", "polish")
    compiled = inner.compile()
    outer = graph.StateGraph(dict)
    outer.add_node("write", lambda given: compiled.invoke(given) and None)
    outer.add_conditional_edges(
        graph.START, lambda _: [types.Send("write", {"x": name}) for name in "abc"], ["write"]
    )
    invoke(outer.compile(), {})
    assert len(set(model.all("session"))) == 1
    assert set(map(frozenset, model.groups().values())) == {
        frozenset("abc"),
        frozenset({"a.", "b.", "c."}),
    }
    assert {fields["name"] for fields in model.calls.values()} == {"draft", "polish"}


def test_called_tasks_that_may_follow_one_another_are_no_group() -> None:
    functional = pytest.importorskip("langgraph.func")
    model = Told()

    @functional.task
    def write(text: str) -> str:
        return str(model.invoke(text).content)

    @functional.entrypoint()
    def program(text: str) -> str:
        return str(write(write(text).result()).result())

    assert program.invoke("a") == "a.."
    assert len(model.groups()) == 2
    assert len(set(model.all("session"))) == 1


# -- any structure --------------------------------------------------------------------------

#: ("call",), ("seq", parts), ("par", parts) or ("batch", width, part).
Shape = Any
_SHAPES = st.recursive(
    st.just(("call",)),
    lambda inner: st.one_of(
        st.tuples(st.just("seq"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("par"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("batch"), st.integers(1, 3), inner),
    ),
    max_leaves=8,
)


def _build(shape: Shape, model: Told, is_async: bool, position: str = "") -> Runnable[str, str]:
    """A chain of the shape, whose calls have their place in the structure as prompts."""
    match shape:
        case ("call",):
            prompt = RunnableLambda(lambda path: f"{path}{position}")
            return (
                RunnableLambda(lambda path: path)
                | {"path": lambda path: path, "said": prompt | model}
                | RunnableLambda(lambda given: given["path"])
            )
        case ("seq", parts):
            chain: Any = RunnableLambda(lambda path: path)
            for number, part in enumerate(parts):
                chain = chain | _build(part, model, is_async, f"{position}/s{number}")
            return chain
        case ("par", parts):
            branches = {
                f"p{number}": _build(part, model, is_async, f"{position}/p{number}")
                for number, part in enumerate(parts)
            }
            return (
                RunnableLambda(lambda path: path)
                | {"path": lambda path: path, "said": RunnableParallel(branches)}
                | RunnableLambda(lambda given: given["path"])
            )
        case ("batch", width, part):
            inner = _build(part, model, is_async, "")

            def batch(path: str) -> str:
                inner.batch([f"{path}{position}/b{number}" for number in range(width)])
                return path

            async def abatch(path: str) -> str:
                await inner.abatch([f"{path}{position}/b{number}" for number in range(width)])
                return path

            return RunnableLambda(batch, abatch)
    raise AssertionError(shape)


def _are_parallel(one: str, other: str) -> bool:
    """Tell by their places whether two calls are in different branches of a fan-out."""
    for left, right in zip(one.split("/"), other.split("/"), strict=False):
        if left != right:
            return left[0] in "pb"
    return False


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=_SHAPES)
def test_no_call_is_in_a_group_with_one_that_it_follows(shape: Shape) -> None:
    partitions = []
    for is_async in (False, True):
        model = Told()
        chain = _build(shape, model, is_async)
        if is_async:
            asyncio.run(chain.ainvoke("."))
        else:
            chain.invoke(".")
        partition = set()
        for group, prompts in model.groups().items():
            members = sorted(prompts)
            if group is not None:
                for number, one in enumerate(members):
                    assert all(_are_parallel(one, other) for other in members[number + 1 :])
                partition.add(frozenset(members))
        partitions.append(partition)
        assert len(set(model.all("session"))) == 1
    assert partitions[0] == partitions[1]


# -- as a guest in a program ------------------------------------------------------------------


def test_the_memory_is_bounded() -> None:
    from uuid import uuid4

    tree = RunTree(max_runs=10)
    for _ in range(50):
        tree.on_chain_start({}, {}, run_id=uuid4())
    assert tree.num_runs == 10


def test_many_threads_at_the_bound() -> None:
    from uuid import uuid4

    tree = RunTree(max_runs=10)

    def run() -> None:
        for _ in range(300):
            run_id = uuid4()
            tree.on_chain_start({}, {}, run_id=run_id)
            tree.on_chain_end({}, run_id=run_id)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tree.num_runs <= 10


async def test_other_handlers_hear_what_they_heard_before() -> None:
    """An inline handler would keep starts of text models from them (langchain issue 39633)."""

    class Text(BaseLLM):
        @property
        def _llm_type(self) -> str:
            return "text"

        def _generate(
            self, prompts: Any, stop: Any = None, run_manager: Any = None, **_: Any
        ) -> Any:
            return LLMResult(generations=[[Generation(text="x")] for _ in prompts])

    class Listener(BaseCallbackHandler):
        def on_llm_start(self, *_: Any, **__: Any) -> None:
            heard.append("start")

        def on_llm_end(self, *_: Any, **__: Any) -> None:
            heard.append("end")

    heard: list[str] = []
    await Text().ainvoke("a", {"callbacks": [Listener()]})
    assert heard == ["start", "end"]


async def test_no_event_of_ours_goes_through_a_thread() -> None:
    loop = asyncio.get_running_loop()
    used = []
    ordinary = loop.run_in_executor

    def run_in_executor(executor: Any, function: Any, *arguments: Any) -> Any:
        used.append(function)
        return ordinary(executor, function, *arguments)

    async def nothing(text: str) -> str:
        return text

    loop.run_in_executor = run_in_executor  # type: ignore[method-assign]
    await RunnableLambda(nothing).ainvoke("a")
    assert used == []
