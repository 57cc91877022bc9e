"""Query engines on the demo model: the paper's map-reduce and chain, call by call and deferred."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess
from llama_index.core import Document, PromptTemplate, Settings, SummaryIndex
from llama_index.core import utils as llama_index_utils
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.parrot import Parrot
from llama_index.llms.parrot._window import reference_counter
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.event_handlers import BaseEventHandler
from parrot_bench.apps import book
from parrot_client.fields import REFERENCE

QUESTION = "What happens?"


def index_of(characters: int) -> SummaryIndex:
    splitter = SentenceSplitter(chunk_size=400, chunk_overlap=0)
    prose = Document(text=book.passage(characters))
    return SummaryIndex.from_documents([prose], transformations=[splitter])


@pytest.fixture(scope="module")
def index() -> SummaryIndex:
    """Some three windows of prose, if a window is 600 tokens."""
    return index_of(6_000)


@pytest.fixture
def own_tokenizer() -> Iterator[None]:
    """Gives LlamaIndex its tokenizer back afterwards."""
    before = llama_index_utils.get_tokenizer()
    yield
    Settings.tokenizer = before


def model(gateway: GatewayProcess, **settings: Any) -> Parrot:
    short = {"model": DEMO_MODEL, "max_tokens": 6, "temperature": 0.0, "context_window": 600}
    settings = {**short, **settings}
    return Parrot(base_url=gateway.base_url, api_key=API_KEY, **settings)


def graph_of(gateway: GatewayProcess, session: str) -> list[dict[str, Any]]:
    calls = gateway.get(f"/v1/sessions/{session}/graph?format=json")["calls"]
    assert all(call["state"] == "done" for call in calls)
    return list(calls)


@pytest.mark.parametrize("use_async", [False, True])
def test_tree_summarize_is_a_map_reduce(
    demo: GatewayProcess, index: SummaryIndex, use_async: bool
) -> None:
    session = f"tree-{use_async}"
    engine = index.as_query_engine(
        llm=model(demo, session=session), response_mode="tree_summarize", use_async=use_async
    )
    assert str(engine.query(QUESTION))
    *leaves, root = graph_of(demo, session)
    assert len(leaves) > 1
    assert {call["name"] for call in (*leaves, root)} == {"TreeSummarize"}
    assert {call["parent"] for call in leaves} != {root["parent"]}
    groups = {call["group"] for call in leaves}
    assert groups == ({leaves[0]["parent"]} if use_async else {None})
    assert root["group"] is None


def test_deferred_tree_summarize_submits_all_of_it(
    demo: GatewayProcess, index: SummaryIndex
) -> None:
    llm = model(demo, defer=True, session="tree-deferred")
    engine = index.as_query_engine(llm=llm, response_mode="tree_summarize")
    response = engine.query(QUESTION)
    assert str(response)
    assert REFERENCE.search(str(response)) is None
    assert llm.resolve(response) is response
    *leaves, root = graph_of(demo, "tree-deferred")
    assert [call["stage"] for call in leaves] == [0] * len(leaves)
    assert set(root["inputs"]) == {call["output"] for call in leaves}
    assert root["stage"] == 1


def test_deferred_and_call_by_call_say_the_same(demo: GatewayProcess, index: SummaryIndex) -> None:
    texts = []
    for defer in (False, True):
        llm = model(demo, defer=defer)
        engine = index.as_query_engine(llm=llm, response_mode="tree_summarize")
        texts.append(str(engine.query(QUESTION)))
    assert texts[0] == texts[1]


async def test_deferred_refine_is_a_chain(demo: GatewayProcess, index: SummaryIndex) -> None:
    llm = model(demo, defer=True, session="refine-deferred", context_window=1600)
    engine = index.as_query_engine(llm=llm, response_mode="refine")
    response = await engine.aquery(QUESTION)
    assert str(response)
    calls = graph_of(demo, "refine-deferred")
    assert [call["stage"] for call in calls] == list(range(len(calls)))
    for before, after in itertools.pairwise(calls):
        assert after["inputs"] == [before["output"]]
    assert {call["name"] for call in calls} == {"Refine"}


def test_a_query_is_a_session(demo: GatewayProcess, index: SummaryIndex) -> None:
    before = {session["id"] for session in demo.get("/v1/sessions")["data"]}
    llm = model(demo, context_window=1600)
    engine = index.as_query_engine(llm=llm, response_mode="compact")
    engine.query(QUESTION)
    new = [each for each in demo.get("/v1/sessions")["data"] if each["id"] not in before]
    assert [each["name"].partition("-")[0] for each in new] == ["RetrieverQueryEngine.query"]
    assert {call["name"] for call in graph_of(demo, new[0]["id"])} == {"CompactAndRefine"}


def test_streamed_answers(demo: GatewayProcess, index: SummaryIndex) -> None:
    llm = model(demo)
    engine = index.as_query_engine(llm=llm, response_mode="tree_summarize", streaming=True)
    response = engine.query(QUESTION)
    assert isinstance(response, StreamingResponse)
    with pytest.raises(TypeError, match="get_response"):
        llm.resolve(response)
    assert str(llm.resolve(response.get_response()))


def deferred(llm: Parrot, prompt: str, **parrot: Any) -> CompletionResponse:
    """A response with the reference that the gateway answers with, as another client gets it."""
    client = openai.OpenAI(base_url=llm.base_url, api_key=API_KEY, max_retries=0)
    answer = client.completions.create(
        model=llm.model,
        prompt=prompt,
        max_tokens=8,
        temperature=0,
        extra_body={"parrot": {"defer": True, **parrot}},
    )
    return CompletionResponse(text=answer.choices[0].text)


def test_resolve_takes_texts_responses_and_json(demo: GatewayProcess) -> None:
    llm = model(demo)
    completion = deferred(llm, "Tell me of a ship.", session="resolve")
    assert REFERENCE.fullmatch(completion.text)
    message = ChatMessage(role="assistant", content=f"It says: {completion.text}")
    text = llm.resolve(completion.text)
    assert REFERENCE.search(text) is None
    assert llm.resolve(completion).text == text
    assert llm.resolve({"a": [completion.text, 1]}) == {"a": [text, 1]}
    assert llm.resolve(message).content == f"It says: {text}"
    assert llm.resolve(ChatResponse(message=message)).message.content == f"It says: {text}"
    # Nothing is asked where there is nothing to resolve.
    nowhere = model(demo)
    nowhere.base_url = "http://127.0.0.1:1/v1"
    assert nowhere.resolve(("plain", 1)) == ("plain", 1)


@pytest.mark.parametrize("how", ["complete", "chat", "stream", "predict"])
def test_outside_of_synthesizers_a_call_answers_with_its_text(
    demo: GatewayProcess, how: str
) -> None:
    llm = model(demo, defer=True, transform="strip")
    if how == "complete":
        text = llm.complete("Tell me of a ship.", defer=True).text
    elif how == "chat":
        text = str(llm.chat([ChatMessage(content="Tell me of a ship.")]).message.content)
    elif how == "stream":
        text = [piece.text for piece in llm.stream_complete("Tell me of a ship.")][-1]
    else:
        text = llm.predict(PromptTemplate("Tell me of {thing}."), thing="a ship")
    assert text
    assert REFERENCE.search(text) is None


def test_who_follows_the_program_sees_texts(demo: GatewayProcess, index: SummaryIndex) -> None:
    class Seen(BaseEventHandler):
        def handle(self, event: BaseEvent, **kwargs: Any) -> None:
            seen.append(event.model_dump_json())

    seen: list[str] = []
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(handler := Seen())
    try:
        engine = index.as_query_engine(llm=model(demo, defer=True), response_mode="tree_summarize")
        assert REFERENCE.search(str(engine.query(QUESTION))) is None
    finally:
        dispatcher.event_handlers.remove(handler)
    assert seen
    assert not any(REFERENCE.search(event) for event in seen)


@pytest.mark.parametrize("mode", ["accumulate", "compact", "simple_summarize", "refine"])
def test_every_synthesizer_answers_with_texts(
    demo: GatewayProcess, index: SummaryIndex, mode: Any
) -> None:
    texts = []
    for defer in (False, True):
        # Sixteen refinements; in 600 tokens a refining prompt leaves room for a few words of
        # text each, which makes hundreds.
        llm = model(demo, defer=defer, context_window=700)
        texts.append(str(index.as_query_engine(llm=llm, response_mode=mode).query(QUESTION)))
    assert REFERENCE.search(texts[1]) is None
    assert texts[0] == texts[1]


def test_a_deferred_text_that_fails_says_where(demo: GatewayProcess) -> None:
    llm = model(demo)
    fails = deferred(llm, "Once", session="failing", transform="json(/missing)")
    then = deferred(llm, f"{fails.text} and then", session="failing")
    with pytest.raises(openai.APIStatusError, match=r"/graph shows") as caught:
        llm.resolve(then)
    assert caught.value.status_code in (424, 502)


async def test_a_deferred_text_that_is_gone_says_so(demo: GatewayProcess) -> None:
    llm = model(demo)
    response = deferred(llm, "Tell me of a ship.", session="gone")
    await asyncio.to_thread(llm.resolve, response)
    _delete(demo, "gone")
    with pytest.raises(openai.NotFoundError, match="A deferred text is gone"):
        await llm.aresolve(response)


def _delete(gateway: GatewayProcess, session: str) -> None:
    client = openai.OpenAI(base_url=gateway.base_url, api_key=API_KEY)
    client.delete(f"/sessions/{session}", cast_to=object)


def test_references_weigh_what_their_texts_may(demo: GatewayProcess, own_tokenizer: None) -> None:
    reference = "[[parrot:vyc7znafmb3jqvl6xx4gyph2iham5tf]]"
    count = reference_counter(str.split, 50)
    assert len(count(f"{reference}\n\n{reference} and more")) == 102
    llm = model(demo, max_tokens=300, context_window=None)
    assert len(llm.tokenizer()(reference)) == 300
    assert len(model(demo, max_tokens=300).tokenizer()(reference)) == 150
    Settings.tokenizer = llm.tokenizer()
    # Eight texts of 300 tokens do not fit in one window: no splitter may cut one in pieces.
    from llama_index.core.indices.prompt_helper import PromptHelper
    from llama_index.core.prompts.default_prompts import DEFAULT_TREE_SUMMARIZE_PROMPT

    helper = PromptHelper.from_llm_metadata(llm.metadata)
    packed = helper.repack(DEFAULT_TREE_SUMMARIZE_PROMPT, [reference] * 8, llm=llm)
    assert len(packed) > 1
    assert sum(text.count(reference) for text in packed) >= 8
    assert REFERENCE.sub("", "".join(packed)).strip() == ""


def test_a_wide_tree_grows_a_level_more(demo: GatewayProcess, own_tokenizer: None) -> None:
    """The leaves' answers do not fit in one window: a level between them and the root."""
    llm = model(demo, defer=True, max_tokens=60, context_window=500, session="wide")
    Settings.tokenizer = llm.tokenizer()
    engine = index_of(3_000).as_query_engine(llm=llm, response_mode="tree_summarize")
    assert str(engine.query(QUESTION))
    stages = [call["stage"] for call in graph_of(demo, "wide")]
    assert max(stages) >= 2
    assert stages.count(max(stages)) == 1


def test_nothing_is_downloaded(demo: GatewayProcess) -> None:
    """A query in a fresh process that can reach this host alone."""
    code = f"""
import socket
resolve = socket.getaddrinfo
def only_here(host, *args, **kwargs):
    assert host in ("127.0.0.1", b"127.0.0.1"), host
    return resolve(host, *args, **kwargs)
socket.getaddrinfo = only_here
from llama_index.core import Document, SummaryIndex
from llama_index.llms.parrot import Parrot
llm = Parrot(model={DEMO_MODEL!r}, max_tokens=4, base_url={demo.base_url!r}, api_key={API_KEY!r})
index = SummaryIndex.from_documents([Document(text="The cat sat. The dog ran. " * 40)])
print(index.as_query_engine(llm=llm, response_mode="tree_summarize").query("Who?"))
"""
    environment = {
        name: text for name, text in os.environ.items() if not name.lower().endswith("_proxy")
    }
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
