"""Named contexts of a session: the pure core, and calls on them through a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from parrot_engine.protocol import Failed, Fill
from scripted_remote import ScriptedRemoteEngine
from semantic_tools import http_of
from serving import Service, read_answer, until

from parrot_gateway.core.contexts import (
    Contents,
    ContextName,
    ContextUse,
    enter,
    find_context,
    free_all_contexts,
    free_context,
    parse_context,
)
from parrot_gateway.core.session import Session
from parrot_gateway.exceptions import (
    ConflictError,
    ContextNotFoundError,
    ContextTooLargeError,
    GatewayError,
    InvalidRequestError,
    SessionFullError,
    UnsupportedError,
)
from parrot_gateway.settings import SessionSettings

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def session_of(**limits: Any) -> Session:
    ids = (f"v{number}" for number in range(1000))
    return Session(
        "s1", "app", "t", now=0, limits=SessionSettings(**limits),
        mint_variable_id=lambda: next(ids),
    )  # fmt: skip


def chat(text: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def use(session: Session, name: str, body: bytes | None = None, path: str = CHAT) -> ContextUse:
    return enter(session, parse_context(name), path, chat("?") if body is None else body)


def say(session: Session, name: str, prompt: str, answer: str) -> list[str]:
    """A whole call; the texts that the model was given."""
    taken = use(session, name)
    shown = json.loads(taken.compose(chat(prompt)))
    taken.append(answer)
    taken.commit()
    taken.leave()
    return [message["content"] for message in shown["messages"]]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("chat", ContextName("chat")),
        (" chat ", ContextName("chat")),
        ("chat<main", ContextName("chat", "main")),
        (" a b < c ", ContextName("a b", "c")),
    ],
)
def test_names(text: str, found: ContextName) -> None:
    assert parse_context(text) == found


@pytest.mark.parametrize("text", ["", "<", "a<", "<a", "a<a", "a<b<c", "a\x00", "x" * 257])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_context(text)
    assert caught.value.param == "context"


async def test_messages_accumulate() -> None:
    session = session_of()
    assert say(session, "chat", "one", "1") == ["one"]
    assert say(session, "chat", "two", "2") == ["one", "1", "two"]
    assert say(session, "chat", "three", "3") == ["one", "1", "two", "2", "three"]
    contents = find_context(session, "chat").contents
    assert contents is not None
    assert json.loads(contents.messages[-1]) == {"role": "assistant", "content": "3"}
    assert session.value_bytes == contents.size_bytes


async def test_messages_keep_their_bytes() -> None:
    session = session_of()
    odd = b'{"role": "user",  "content": "caf\\u00e9", "x": 1.0}'
    taken = use(session, "chat")
    first = b'{"messages":[' + odd + b'],"seed":  7}'
    assert taken.compose(first) is first
    taken.append("!")
    taken.commit()
    taken.leave()
    taken = use(session, "chat")
    assert odd in taken.compose(chat("two"))
    taken.leave()


async def test_text_accumulates() -> None:
    session = session_of()
    for prompt, answer, whole in [("a", "b", "a"), ("c", "d", "abc"), ("e", "f", "abcde")]:
        body = json.dumps({"prompt": prompt}).encode()
        taken = use(session, "t", body, TEXT)
        assert json.loads(taken.compose(body))["prompt"] == whole
        taken.append(answer)
        taken.commit()
        taken.leave()


async def test_a_failed_call_leaves_it_as_it_was() -> None:
    session = session_of()
    taken = use(session, "chat")
    taken.compose(chat("lost"))
    taken.append("half")
    taken.leave()
    assert session.contexts == {}
    say(session, "chat", "one", "1")
    before = find_context(session, "chat").contents
    taken = use(session, "chat")
    taken.compose(chat("lost"))
    taken.commit()
    taken.undo()
    taken.leave()
    assert find_context(session, "chat").contents == before
    assert before is not None
    assert session.value_bytes == before.size_bytes


async def test_forks_part_ways() -> None:
    session = session_of()
    say(session, "main", "one", "1")
    branch = use(session, "a<main")
    await settled(branch)
    assert b"one" in branch.compose(chat("two"))
    branch.commit()
    branch.leave()
    assert say(session, "main", "three", "3") == ["one", "1", "three"]
    with pytest.raises(ConflictError) as caught:
        use(session, "a<main")
    assert caught.value.code == "context_exists"
    with pytest.raises(ContextNotFoundError):
        use(session, "b<nothing")
    assert set(session.contexts) == {"main", "a"}


async def settled(*uses: ContextUse) -> None:
    for _ in range(5):
        await asyncio.sleep(0)
    assert all(each.has_turn for each in uses)


async def test_one_at_a_time_in_order() -> None:
    session, called = session_of(), []
    first, second, third = (use(session, "chat") for _ in range(3))
    for name, each in (("second", second), ("third", third)):
        each.when_turn(lambda name=name: called.append(name))  # type: ignore[misc]
    assert (first.has_turn, second.has_turn, third.has_turn) == (True, False, False)
    second.leave()
    first.compose(chat("one"))
    first.commit()
    first.leave()
    first.leave()
    await settled(third)
    assert called == ["third"]
    assert b"one" in third.compose(chat("three"))
    third.leave()


async def test_a_fork_waits_for_calls_that_came_before_it() -> None:
    session = session_of()
    first = use(session, "main")
    fork = use(session, "a<main")
    later = use(session, "main")
    assert not fork.has_turn
    first.compose(chat("one"))
    first.commit()
    first.leave()
    # What the fork begins with is settled now: later calls need not wait for its end.
    await settled(fork, later)
    later.compose(chat("later"))
    later.commit()
    later.leave()
    composed = fork.compose(chat("two"))
    assert b"one" in composed
    assert b"later" not in composed
    fork.leave()
    assert set(session.contexts) == {"main"}


async def test_a_fork_of_what_failed() -> None:
    session = session_of()
    first = use(session, "main")
    fork = use(session, "a<main")
    first.leave()
    await settled(fork)
    with pytest.raises(ContextNotFoundError):
        fork.compose(chat("two"))
    fork.leave()
    assert session.contexts == {}


async def test_kinds_do_not_mix() -> None:
    session = session_of()
    say(session, "chat", "one", "1")
    for name in ("chat", "new<chat"):
        with pytest.raises(ConflictError) as caught:
            use(session, name, b'{"prompt": "x"}', TEXT)
        assert caught.value.code == "context_kind"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat("x", n=2), "n"),
        (CHAT, b"{}", "messages"),
        (CHAT, chat("x", tools=[{}]), "tools"),
        (CHAT, chat("x", continue_final_message=True), "continue_final_message"),
        (TEXT, b'{"prompt": ["a", "b"]}', "prompt"),
        (TEXT, b'{"prompt": "a", "echo": true}', "echo"),
        ("/v1/embeddings", b'{"input": "a"}', "context"),
    ],
)
async def test_what_a_context_cannot_take(path: str, body: bytes, param: str) -> None:
    session = session_of()
    with pytest.raises((InvalidRequestError, UnsupportedError)) as caught:
        use(session, "chat", body, path)
    assert caught.value.param == param
    assert session.contexts == {}


async def test_bounds() -> None:
    session = session_of(max_contexts=2, max_context_bytes=500)
    say(session, "a", "one", "1")
    say(session, "b", "one", "1")
    with pytest.raises(SessionFullError):
        use(session, "c")
    taken = use(session, "a")
    with pytest.raises(ContextTooLargeError):
        taken.compose(chat("x" * 500))
    taken.leave()
    taken = use(session, "a")
    taken.compose(chat("x"))
    taken.append("y" * 500)
    with pytest.raises(ContextTooLargeError):
        taken.commit()
    taken.leave()
    assert say(session, "a", "two", "2") == ["one", "1", "two"]


async def test_freeing() -> None:
    session = session_of()
    say(session, "a", "one", "1")
    taken = use(session, "a")
    with pytest.raises(ConflictError) as caught:
        free_context(session, "a")
    assert caught.value.code == "context_in_use"
    taken.leave()
    free_context(session, "a")
    assert (session.contexts, session.value_bytes) == ({}, 0)
    with pytest.raises(ContextNotFoundError):
        free_context(session, "a")
    say(session, "b", "one", "1")
    free_all_contexts(session)
    assert (session.contexts, session.value_bytes) == ({}, 0)


class _Model(RuleBasedStateMachine):
    """Whatever calls do, contexts hold what their successful calls said, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.session = session_of()
        self.open: list[tuple[str, ContextUse, bool]] = []
        self.truth: dict[str, list[str]] = {}
        self.number = 0

    def teardown(self) -> None:
        for _, taken, _ in self.open:
            taken.leave()
        self.settle()
        self.loop.close()

    def settle(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(asyncio.sleep(0))

    @rule(name=st.sampled_from("abc"), parent=st.sampled_from([None, None, "a", "b", "c"]))
    def begin(self, name: str, parent: str | None) -> None:
        if name == parent:
            return
        wanted = ContextName(name, parent)

        async def go() -> ContextUse:
            return enter(self.session, wanted, CHAT, chat("?"))

        try:
            taken = self.loop.run_until_complete(go())
        except GatewayError:
            return
        self.open.append((name, taken, parent is not None))
        self.settle()

    @rule(index=st.integers(0, 5), ends=st.sampled_from(["well", "badly", "early"]))
    def end(self, index: int, ends: str) -> None:
        if index >= len(self.open):
            return
        name, taken, is_fork = self.open.pop(index)
        if ends != "early" and taken.has_turn:
            self.number += 1
            try:
                shown = json.loads(taken.compose(chat(f"q{self.number}")))
            except GatewayError:
                taken.leave()
                self.settle()
                return
            texts = [message["content"] for message in shown["messages"]]
            if not is_fork:
                assert texts[:-1] == self.truth.get(name, [])
            if ends == "well":
                taken.append("answer")
                taken.commit()
                self.truth[name] = [*texts, "answer"]
        taken.leave()
        self.settle()

    @rule(name=st.sampled_from("abc"))
    def free(self, name: str) -> None:
        try:
            free_context(self.session, name)
        except GatewayError:
            return
        self.truth.pop(name, None)

    @invariant()
    def holds_what_was_said(self) -> None:
        assert self.session.value_bytes == sum(
            find_context(self.session, name).size_bytes for name in self.session.contexts
        )
        held = {name: texts_of(find_context(self.session, name).contents)
                for name in self.session.contexts}  # fmt: skip
        assert {name: texts for name, texts in held.items() if texts} == self.truth
        waiting = {name for name, _, _ in self.open}
        if not self.open:
            assert set(held) == set(self.truth)
        for name in waiting:
            turns = [taken for own, taken, _ in self.open if own == name and taken.has_turn]
            assert len(turns) <= 1


def texts_of(contents: Contents | None) -> list[str]:
    return [json.loads(raw)["content"] for raw in contents.messages] if contents else []


TestContexts = _Model.TestCase
TestContexts.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# -- through a socket -------------------------------------------------------------------------


def prompts_of(engine: ScriptedRemoteEngine) -> Iterator[str]:
    for item in engine.submitted:
        if isinstance(item, Fill):
            yield engine.tokenizer.decode(item.token_ids, skip_special_tokens=False)


async def call(service: Service, text: str, **parrot: Any) -> tuple[int, Any]:
    parrot = {"session": "app", **parrot}
    status, _, answer = await service.post(CHAT, json.loads(chat(text, parrot=parrot)))
    return status, json.loads(answer)


async def ask(service: Service, path: str, method: str = "GET") -> tuple[int, Any]:
    reader, writer = await service.connect()
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
    try:
        async with asyncio.timeout(20):
            status, _, body = await read_answer(reader)
    finally:
        writer.close()
    return status, json.loads(body)


ONE = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nHello world<|im_end|>\n"


async def test_a_chat_goes_on(service: Service, engine: ScriptedRemoteEngine) -> None:
    async with service.client() as client:
        for text in ("one", "two"):
            answer = await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": text}],
                extra_headers={"X-Parrot-Session": "app", "X-Parrot-Context": "chat"},
            )
            assert answer.choices[0].message.content == "Hello world"
    assert list(prompts_of(engine))[-1] == (
        ONE + "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    status, shown = await ask(service, "/v1/sessions/app/contexts/chat")
    assert status == 200
    assert [message["content"] for message in shown["messages"]] == [
        "one", "Hello world", "two", "Hello world"]  # fmt: skip
    status, listed = await ask(service, "/v1/sessions/app/contexts")
    assert [item["name"] for item in listed["data"]] == ["chat"]
    assert await ask(service, "/v1/sessions/app/contexts/chat", "DELETE") == (
        200,
        {"name": "chat", "object": "context", "deleted": True},
    )
    assert (await ask(service, "/v1/sessions/app/contexts/chat"))[0] == 404
    await call(service, "three", context="chat")
    assert list(prompts_of(engine))[-1] == (
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_streams_go_on_too(service: Service, engine: ScriptedRemoteEngine) -> None:
    async with service.client() as client:
        for text in ("one", "two"):
            stream = await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": text}],
                stream=True,
                extra_body={"parrot": {"session": "app", "context": "chat"}},
            )
            assert [chunk async for chunk in stream]
    assert list(prompts_of(engine))[-1].startswith(ONE)


async def test_completions_go_on(service: Service, engine: ScriptedRemoteEngine) -> None:
    for text in ("one ", " two"):
        await service.post(
            TEXT, {"model": "m", "prompt": text, "parrot": {"session": "a", "context": "t"}}
        )
    assert list(prompts_of(engine))[-1] == "one Hello world two"
    # Tokenized whole, as any text.
    fill = next(item for item in reversed(engine.submitted) if isinstance(item, Fill))
    assert fill.token_ids == engine.tokenizer.encode("one Hello world two")


async def test_deferred_calls_run_in_their_order(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    engine.automatic = False
    for number in range(4):
        status, _ = await call(
            service, f"q{number}", context="chat", defer=True, output=f"o{number}"
        )
        assert status == 200
    await engine.wait_for(lambda: len(engine.contexts) == 1)
    engine.automatic = True
    engine.step()
    variables = (await ask(service, "/v1/variables?session=app"))[1]["data"]
    ids = {item["name"]: item["id"] for item in variables}
    status, value = await ask(service, f"/v1/variables/{ids['o3']}?timeout=10")
    assert (status, value.get("value")) == (200, "Hello world"), value
    last = list(prompts_of(engine))[-1]
    assert [last.index(f"q{number}") for number in range(4)] == sorted(
        last.index(f"q{number}") for number in range(4)
    )
    assert len(list(prompts_of(engine))) == 4
    assert engine.most_contexts == 1


async def test_forks(service: Service, engine: ScriptedRemoteEngine) -> None:
    await call(service, "one", context="main")
    await asyncio.gather(*(call(service, f"b{n}", context=f"branch{n}<main") for n in range(3)))
    branches = list(prompts_of(engine))[1:]
    assert all(prompt.startswith(ONE) for prompt in branches)
    assert sorted(prompt[len(ONE) :] for prompt in branches) == [
        f"<|im_start|>user\nb{n}<|im_end|>\n<|im_start|>assistant\n" for n in range(3)
    ]
    status, answer = await call(service, "x", context="branch0<main")
    assert (status, answer["error"]["code"]) == (409, "context_exists")


async def test_failures_change_nothing(service: Service, engine: ScriptedRemoteEngine) -> None:
    await call(service, "one", context="chat")
    script = engine.script
    engine.script = lambda prompt, sampling: [65, Failed(0, "engine_error", "x")]
    assert (await call(service, "bad", context="chat"))[0] == 500
    engine.script = script
    status, answer = await call(service, "x" * 600, context="chat")
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    await call(service, "two", context="chat")
    assert list(prompts_of(engine))[-1] == (
        ONE + "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_client_that_leaves_changes_nothing(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    await call(service, "one", context="chat")
    engine.automatic = False
    body = chat("lost", parrot={"session": "app", "context": "chat"})
    _, writer = await service.send(CHAT, body)
    await engine.wait_for(lambda: bool(engine.contexts))
    waiting = asyncio.create_task(call(service, "two", context="chat"))
    writer.close()
    await engine.wait_for(lambda: "two" in list(prompts_of(engine))[-1])
    engine.automatic = True
    engine.step()
    assert (await waiting)[0] == 200
    assert list(prompts_of(engine))[-1].startswith(ONE + "<|im_start|>user\ntwo")


async def test_a_context_needs_a_session(service: Service, engine: ScriptedRemoteEngine) -> None:
    status, answer = await call(service, "one", session=None, context="chat")
    assert (status, answer["error"]["param"]) == (400, "session")
    status, answer = await call(service, "one", context="new<nothing")
    assert (status, answer["error"]["code"]) == (404, "context_not_found")
    assert engine.submitted == []


async def test_ended_sessions_keep_nothing(service: Service) -> None:
    await call(service, "one", context="chat")
    store = service.gateway.semantic.sessions
    assert store.statistics().value_bytes > 0
    assert (await ask(service, "/v1/sessions/app", "DELETE"))[0] == 200
    assert store.statistics().value_bytes == 0


async def test_calls_keep_their_order_while_inputs_are_missing(
    engine: ScriptedRemoteEngine,
) -> None:
    async with http_of(engine) as http:
        first = await http.call(
            CHAT, "{{x}}", parrot={"session": "app", "context": "c", "defer": True,
                                   "inputs": "x=x", "transform": "upper"},
        )  # fmt: skip
        assert first.status_code == 200
        second = asyncio.create_task(
            http.call(CHAT, "two", parrot={"session": "app", "context": "c"})
        )
        await until(lambda: http.service.gateway.semantic.executor.statistics().submitted == 2)
        busy = await http.delete("/v1/sessions/app/contexts/c")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "context_in_use")
        assert list(prompts_of(engine)) == []
        variables = (await http.get("/v1/variables?session=app")).json()["data"]
        (found,) = [item["id"] for item in variables if item["name"] == "x"]
        assert (await http.put(f"/v1/variables/{found}", json={"value": "one"})).is_success
        assert (await second).status_code == 200
        output = first.headers["x-parrot-variable"]
        assert (await http.value(output)).json()["value"] == "<USER\nONE\nASSISTANT\n>"
        # What the model wrote is kept, not what a transform made of it.
        held = (await http.get("/v1/sessions/app/contexts/c")).json()["messages"]
        assert [message["content"] for message in held[:3]] == [
            "one", "<user\none\nassistant\n>", "two"]  # fmt: skip


async def test_nobody_waits_for_ever_for_a_context(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine, call_timeout_s=0.2) as http:
        stuck = await http.call(
            CHAT, "{{x}}",
            parrot={"session": "app", "context": "c", "defer": True, "inputs": "x=x"},
        )  # fmt: skip
        answer = await http.call(CHAT, "two", parrot={"session": "app", "context": "c"})
        assert answer.status_code == 504
        assert "context 'c', which other calls hold" in answer.json()["error"]["message"]
        assert (await http.delete(f"/v1/calls/{stuck.headers['x-parrot-call']}")).is_success
        answer = await http.call(CHAT, "three", parrot={"session": "app", "context": "c"})
        assert answer.status_code == 200
        assert list(prompts_of(engine)) == ["<|im_start|>user\nthree<|im_end|>\n"
                                            "<|im_start|>assistant\n"]  # fmt: skip


async def test_ending_a_session_ends_its_lines(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine) as http:
        engine.automatic = False
        calls = [
            asyncio.create_task(http.call(CHAT, "x", parrot={"session": "app", "context": name}))
            for name in ("a", "a", "b<a", "b")
        ]
        await until(lambda: http.service.gateway.semantic.executor.statistics().submitted == 4)
        assert (await http.delete("/v1/sessions/app")).is_success
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} == {409}
        engine.automatic = True
        assert http.service.gateway.semantic.sessions.statistics().value_bytes == 0


async def test_refused_calls_take_no_place(engine: ScriptedRemoteEngine) -> None:
    """A call that cannot be submitted leaves neither a context nor a place in a line."""
    async with http_of(engine) as http:
        await http.call(CHAT, "one", parrot={"session": "app", "output": "o"})
        answer = await http.call(
            CHAT, "two", parrot={"session": "app", "context": "c", "output": "o"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "output_taken")
        assert (await http.get("/v1/sessions/app/contexts")).json()["data"] == []


async def test_waiting_for_a_call_behind_in_line_is_a_cycle(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine) as http:
        first = {"context": "c", "defer": True, "inputs": "y=y", "name": "first"}
        await http.call(CHAT, "{{y}}", parrot={"session": "app", **first})
        await http.call(CHAT, "{{x}}", parrot={"session": "app", "defer": True, "inputs": "x=x",
                                               "output": "y"})  # fmt: skip
        second = {"context": "c", "output": "x", "name": "second"}
        answer = await http.call(CHAT, "two", parrot={"session": "app", **second})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "dependency_cycle")
        assert "context c" in answer.json()["error"]["message"]
        assert (await http.delete("/v1/sessions/app")).is_success
