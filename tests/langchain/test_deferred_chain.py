"""Deferred texts in LangChain: messages, prompts, parsers, chains; nothing of a gateway yet."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from typing import Any

import pytest
from deferring import Book, BookChat, BookLLM
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import (
    CommaSeparatedListOutputParser,
    JsonOutputParser,
    NumberedListOutputParser,
    PydanticOutputParser,
    StrOutputParser,
    XMLOutputParser,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.tracers.context import collect_runs
from langchain_parrot.deferred import DeferredText, deferred_message
from langchain_parrot.exceptions import DeferredFailedError
from langchain_parrot.linking import run_tree
from pydantic import BaseModel


class Person(BaseModel):
    name: str


@pytest.fixture(params=[BookChat, BookLLM])
def model_class(request: pytest.FixtureRequest) -> Any:
    return request.param


async def _run(chain: Any, given: Any, how: str) -> Any:
    if how == "invoke":
        return chain.invoke(given)
    if how == "ainvoke":
        return await chain.ainvoke(given)
    return await asyncio.to_thread(chain.invoke, given)


HOW = pytest.mark.parametrize("how", ["invoke", "ainvoke", "thread"])


@HOW
async def test_str_output_parser_returns_the_deferred_text_itself(
    model_class: Any, how: str
) -> None:
    book = Book(a="Hello")
    text = book.text("a")
    answer = await _run(model_class(texts=[text]) | StrOutputParser(), "Hi", how)
    assert answer is text
    assert book.asked == []
    assert answer == "Hello"


PARSERS: list[tuple[Any, str, Any]] = [
    (JsonOutputParser(), '```json\n{"name": "Ada"}\n```', {"name": "Ada"}),
    (PydanticOutputParser(pydantic_object=Person), '{"name": "Ada"}', Person(name="Ada")),
    (CommaSeparatedListOutputParser(), "a, b", ["a", "b"]),
    (NumberedListOutputParser(), "1. a\n2. b", ["a", "b"]),
    (XMLOutputParser(parser="xml"), "<a><b>c</b></a>", {"a": [{"b": "c"}]}),
    (JsonOutputParser().with_config(run_name="mine"), '{"name": "Ada"}', {"name": "Ada"}),
]


@HOW
@pytest.mark.parametrize("number", range(len(PARSERS)))
async def test_parsers_that_look_see_the_value(number: int, model_class: Any, how: str) -> None:
    parser, value, expected = PARSERS[number]
    book = Book(a=value)
    chain = model_class(texts=[book.text("a")]) | parser
    assert await _run(chain, "Hi", how) == expected
    assert book.asked == ["[[a]]"]


@HOW
async def test_a_text_without_value_raises_its_own_error_out_of_the_parser(
    model_class: Any, how: str
) -> None:
    book = Book(a=DeferredFailedError("mend it", reference="[[a]]"))
    chain = model_class(texts=[book.text("a")]) | NumberedListOutputParser()
    runs = run_tree.num_runs
    with pytest.raises(DeferredFailedError, match="mend it"):
        await _run(chain, "Hi", how)
    assert run_tree.num_runs == runs


async def test_a_parser_in_an_event_loop_does_not_block_it() -> None:
    class Blocking(Book):
        def get(self, reference: str, timeout: float) -> str:
            threads.append(threading.current_thread())
            return super().get(reference, timeout)

    threads: list[threading.Thread] = []
    chain = BookChat(texts=[Blocking(a="1. a").text("a")]) | NumberedListOutputParser()
    assert await chain.ainvoke("Hi") == ["a"]
    assert len(threads) == 1
    assert threading.current_thread() not in threads


@HOW
async def test_a_chain_travels_as_references(model_class: Any, how: str) -> None:
    book = Book(a="first", b="second", c="third")
    model = model_class(texts=[book.text(name) for name in "abc"])
    chain = (
        PromptTemplate.from_template("Write {x}")
        | model
        | StrOutputParser()
        | {"y": RunnablePassthrough()}
        | ChatPromptTemplate.from_messages([("system", "Be kind"), ("user", "More {y}")])
        | model
        | StrOutputParser()
        | (lambda text: {"z": text})
        | RunnablePassthrough.assign(w=lambda given: given["z"])
        | PromptTemplate.from_template("Last {z} {w}")
        | model
        | StrOutputParser()
    )
    text = await _run(chain, {"x": "it"}, how)
    assert isinstance(text, DeferredText)
    assert book.asked == []
    assert text == "third"
    assert book.asked == ["[[c]]"]
    if model_class is BookChat:
        assert model.prompts == [["Write it"], ["Be kind", "More [[a]]"], ["Last [[b]] [[b]]"]]


def test_prompt_templates_of_other_kinds() -> None:
    book = Book(a="a < b")
    text = book.text("a")
    plain = ChatPromptTemplate.from_messages(
        [("user", "{x}"), MessagesPlaceholder("history"), ("ai", "{x}")]
    )
    messages = plain.invoke({"x": text, "history": [deferred_message(text)]}).to_messages()
    assert book.asked == []
    assert [f"{message.content}" for message in messages] == ["[[a]]"] * 3
    assert messages[1].content is text
    # These templates look at what they put in: right, but it ends the deferral.
    jinja = PromptTemplate.from_template("Say {{ x }}", template_format="jinja2")
    assert jinja.invoke({"x": text}).to_string() == "Say a < b"
    text = book.text("a")
    bare = PromptTemplate.from_template("Say {{{x}}}", template_format="mustache")
    assert bare.invoke({"x": text}).to_string() == "Say [[a]]"
    escaped = PromptTemplate.from_template("Say {{x}}", template_format="mustache")
    assert escaped.invoke({"x": text}).to_string() == "Say a &lt; b"


def test_parallel_branches_stay_deferred() -> None:
    book = Book(a="left", b="right")
    branches = RunnableParallel(
        one=BookChat(texts=[book.text("a")]) | StrOutputParser(),
        two=BookChat(texts=[book.text("b")]) | StrOutputParser(),
    )
    found = branches.invoke("Hi")
    assert book.asked == []
    assert found == {"one": "left", "two": "right"}


def test_functions_get_the_deferred_text() -> None:
    book = Book(a="word " * 3)
    chain = BookChat(texts=[book.text("a")]) | StrOutputParser() | RunnableLambda(len)
    assert chain.invoke("Hi") == 15


def test_tracers_and_other_handlers_do_not_wait() -> None:
    class Seen(BaseCallbackHandler):
        def on_llm_end(self, response: Any, **_: Any) -> None:
            seen.append(response.generations[0][0].text)

    seen: list[str] = []
    book = Book(a="Hello")
    chain = BookChat(texts=[book.text("a")]) | StrOutputParser()
    with collect_runs() as runs:
        text = chain.invoke("Hi", {"callbacks": [Seen()]})
    assert len(runs.traced_runs) == 1
    assert seen[0] is text
    assert book.asked == []


def test_a_deferred_message_is_an_ai_message() -> None:
    book = Book(a="Hello")
    text = book.text("a")
    message = deferred_message(text, response_metadata={"model": "m"}, id="1")
    assert isinstance(message, AIMessage)
    assert message.content is text
    assert message.text is text
    assert message.model_copy(update={"id": "2"}).content is text
    assert copy.deepcopy(message).content is text
    assert repr(message).startswith("AIMessage(content=<deferred [[a]]>")
    assert book.asked == []
    assert message == AIMessage("Hello", response_metadata={"model": "m"}, id="1")


@pytest.mark.parametrize(
    "look",
    [
        lambda message: message.model_dump()["content"],
        lambda message: AIMessage.model_validate_json(message.model_dump_json()).content,
        lambda message: pickle.loads(pickle.dumps(message)).content,
        lambda message: message.content_blocks[0]["text"],
        lambda message: message.pretty_repr().rpartition("\n")[2],
    ],
)
def test_what_keeps_or_shows_a_message_has_the_value(look: Any) -> None:
    message = deferred_message(Book(a="Hello").text("a"))
    found = look(message)
    assert found == "Hello"
    assert type(found) is str


def test_checkpoints_hold_values() -> None:
    serde = pytest.importorskip("langgraph.checkpoint.serde.jsonplus").JsonPlusSerializer()
    message = deferred_message(Book(a="Hello").text("a"))
    stored = serde.loads_typed(serde.dumps_typed({"messages": [HumanMessage("Hi"), message]}))
    assert type(stored["messages"][1]) is AIMessage
    assert stored["messages"][1].content == "Hello"
