"""Bytes through the gateway: unchanged, whole, and never silently cut."""

from __future__ import annotations

import asyncio
import gc
import itertools
from functools import partial
from typing import Any

import aiohttp
import msgspec
import pytest
from harness.gateway.relaying import Relay, relaying
from harness.waiting import until
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.api.upstream import passthrough
from parrot_gateway.api.upstream.event_tail import MAX_HELD_BYTES, Dialect, EventTail
from parrot_gateway.backends.upstreams.answer import rewrite
from parrot_gateway.calls.usage import Usage, usage_of_body, usage_of_tail
from parrot_gateway.exceptions import InvalidRequestError, UpstreamError
from parrot_gateway.http.exchange import Exchange

BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}
CHAT = "/chat/completions"
ERROR = UpstreamError("it broke")
ERROR_EVENT = b"data: " + ERROR.body() + b"\n\ndata: [DONE]\n\n"


# -- event tail, without I/O


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


END = b'data: {"choices":[{"finish_reason":"stop"}]}'


@given(
    events=st.lists(st.text(max_size=12), max_size=8),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_what_is_passed_on_is_what_came_in(
    events: list[str], line_end: str, cuts: list[int]
) -> None:
    blank = (line_end * 2).encode()
    whole = b"".join(b"data: " + msgspec.json.encode({"t": text}) + blank for text in events)
    whole += END + blank + b"data: [DONE]" + blank
    tail = EventTail("chat")
    passed = b""
    for piece in pieces(whole, cuts):
        passed += tail.feed(piece)
        # Only whole events leave; CRLF is ambiguous at a cut, LF and CR are not.
        if line_end != "\r\n":
            assert passed == b"" or passed.endswith(blank)
    assert passed + tail.end(ERROR) == whole


@given(cuts=st.lists(st.integers(0, 10_000), max_size=6), kept=st.integers(0, 3))
def test_a_cut_stream_ends_in_an_error_event_after_whole_events(cuts: list[int], kept: int) -> None:
    event = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n'
    whole = event * kept + event[:-9]
    tail = EventTail("chat")
    passed = b"".join(tail.feed(piece) for piece in pieces(whole, cuts))
    assert passed + tail.fail(ERROR) == event * kept + ERROR_EVENT


def test_a_plain_end_without_a_finish_reason_is_an_error() -> None:
    tail = EventTail("chat")
    passed = tail.feed(b'data: {"finish_reason":null}\n\n')
    assert passed + tail.end(ERROR) == passed + ERROR_EVENT


def test_a_missing_blank_line_is_put_in_before_the_error() -> None:
    tail = EventTail("chat")
    assert tail.feed(b'data: {"a": 1}') == b""
    assert tail.end(ERROR) == b'data: {"a": 1}\n\n' + ERROR_EVENT


@pytest.mark.parametrize(
    "end",
    [
        b'data: {"choices":[{"finish_reason": "length"}]}\n\n',
        b"data: [DONE]\n\n",
        b"data:[DONE]\n",
        b'data: {"error": {"message": "theirs"}}\n\n',
    ],
)
def test_streams_that_are_complete_get_nothing_added(end: bytes) -> None:
    tail = EventTail("chat")
    assert tail.feed(end) + tail.end(ERROR) == end


def test_generated_text_cannot_look_like_an_end() -> None:
    text = msgspec.json.encode({"content": '"finish_reason": "stop" data: [DONE] \n\ndata: [DONE]'})
    tail = EventTail("chat")
    passed = tail.feed(b"data: " + text + b"\n\n")
    assert passed.endswith(b"\n\n")
    assert tail.end(ERROR) == ERROR_EVENT


def test_an_endless_event_is_passed_on_in_pieces() -> None:
    tail = EventTail("chat")
    start = b"data: " + b"x" * (MAX_HELD_BYTES + 1)
    assert tail.feed(start) == start
    assert tail.fail(ERROR) == b"\n\n" + ERROR_EVENT


def test_an_endless_event_that_came_to_its_end_needs_no_line_end() -> None:
    tail = EventTail("chat")
    tail.feed(b"data: " + b"x" * (MAX_HELD_BYTES + 1))
    assert tail.feed(b'x\n\ndata: {"a') == b"x\n\n"
    assert tail.fail(ERROR) == ERROR_EVENT


def test_what_follows_done_is_waited_for() -> None:
    tail = EventTail("chat")
    tail.feed(b"data: [DONE]\n\n")
    assert tail.done
    tail = EventTail("chat")
    tail.feed(b"data: [DONE]\n\ndata: {")
    assert not tail.done


def test_a_break_after_the_end_is_no_error() -> None:
    tail = EventTail("chat")
    tail.feed(b"data: [DONE]\n\n")
    assert tail.fail(ERROR) == b""


def test_other_dialects_report_errors_their_way() -> None:
    responses = EventTail("responses")
    responses.feed(b'event: x\ndata: {"type":"x","sequence_number":4}\n\n')
    event = responses.fail(ERROR)
    assert event.startswith(b"event: error\ndata: ")
    assert msgspec.json.decode(event[19:]) == {
        "type": "error", "code": "upstream_error", "message": "it broke", "param": None,
        "sequence_number": 5,
    }  # fmt: skip
    messages = EventTail("messages").fail(ERROR)
    assert msgspec.json.decode(messages[19:])["error"]["type"] == "api_error"


@pytest.mark.parametrize("dialect", ["responses", "other"])
def test_a_long_last_event_ends_a_responses_stream(dialect: Dialect) -> None:
    last = b'data: {"type":"response.completed","text":"' + b"y" * 200_000 + b'"}\n\n'
    tail = EventTail(dialect)
    passed = b"".join(tail.feed(last[i : i + 1000]) for i in range(0, len(last), 1000))
    assert passed + tail.end(ERROR) == last


# -- usage


def test_usage_is_found_in_bodies_and_tails() -> None:
    details = {"cached_tokens": 3}
    chat = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": details}
    assert usage_of_body(msgspec.json.encode({"usage": chat})) == Usage(7, 5, 3)
    responses = {"input_tokens": 7, "output_tokens": 5, "input_tokens_details": details}
    assert usage_of_body(msgspec.json.encode({"usage": responses})) == Usage(7, 5, 3)
    long = msgspec.json.encode({"text": "x" * 100_000, "usage": chat})
    assert usage_of_body(long) == Usage(7, 5, 3)
    tail = b'"x", "usage": null}\n\ndata: {"usage": ' + msgspec.json.encode(chat) + b"}\n\n"
    assert usage_of_tail(tail) == Usage(7, 5, 3)
    assert usage_of_tail(msgspec.json.encode('"usage": {"prompt_tokens": 1}')) is None
    assert usage_of_body(b"no JSON") is None


# -- rewriting of bodies


def test_a_body_without_need_of_change_is_the_same_object() -> None:
    body = b'{"model" : "m",  "x": 1.0e0}'
    assert rewrite(body, None) is body
    mentioned = b'{"model": "m", "messages": [{"parrot": 1}], "text": "\\"parrot\\""}'
    assert rewrite(mentioned, None) is mentioned


@given(
    fields=st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=5,
        ),
        max_size=6,
    ),
    model=st.text(max_size=10),
)
def test_only_model_and_parrot_change(fields: dict[str, Any], model: str) -> None:
    fields = {**fields, "model": "old"}
    body = msgspec.json.encode({**fields, "parrot": {"session": "s"}})
    changed = msgspec.json.decode(rewrite(body, model))
    assert changed == {**{k: v for k, v in fields.items() if k != "parrot"}, "model": model}
    assert list(changed) == [name for name in fields if name != "parrot"]


def test_values_keep_their_bytes_when_the_model_changes() -> None:
    body = b'{"a": 1.0e0, "model": "x", "b": [1,  2], "c": "\\u00e9", "d": 123456789012345678901}'
    changed = rewrite(body, "yy")
    for value in (b"1.0e0", b"[1,  2]", b'"\\u00e9"', b"123456789012345678901", b'"yy"'):
        assert value in changed


def test_what_must_be_changed_and_cannot_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        rewrite(b"[1, 2]", "other")


# -- through real sockets


@pytest.mark.parametrize("path", [CHAT, "/completions", "/embeddings", "/responses"])
@pytest.mark.parametrize("script", ["", "size=200000", "unicode=1, size=90", "fault=error200"])
async def test_answers_are_byte_identical(path: str, script: str) -> None:
    async with relaying() as relay:
        direct = await relay.post_direct(path, BODY, script)
        answer = await relay.post(path, BODY, script)
        assert answer.status == direct.status == 200
        assert answer.body == direct.body
        assert answer.headers["content-type"] == direct.headers["content-type"]
        # Negative control: a gateway that parses and prints would fail here.
        assert msgspec.json.encode(answer.json) != direct.body


@pytest.mark.parametrize("path", [CHAT, "/completions", "/responses"])
@pytest.mark.parametrize(
    "script",
    [
        "chunks=5",
        "chunks=300, size=40",
        "chunks=4, unicode=1, size=30, split=7",
        "chunks=4, framing=crlf, split=5",
        "chunks=4, framing=cr, split=9",
        "chunks=4, comments=1",
        "chunks=4, usage=1",
        "chunks=4, done=0",
        "chunks=3, delay_ms=5",
    ],
)
async def test_streams_are_byte_identical(path: str, script: str) -> None:
    async with relaying() as relay:
        direct = await relay.post_direct(path, STREAM, script)
        answer = await relay.post(path, STREAM, script)
        assert answer.status == 200
        assert answer.body == direct.body
        assert len(answer.body) > 300
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-length" not in answer.headers


async def test_calls_leave_nothing_to_the_garbage_collector() -> None:
    """Nobody holds their requests and answers when they have ended."""
    async with relaying() as relay:
        gc.collect()
        gc.disable()
        try:
            for body in (BODY, STREAM):
                await relay.post(CHAT, body, "chunks=4")
            # In use, or held by each other: nothing has been collected.
            objects = partial(gc.get_objects, generation=0)
            await until(lambda: not any(isinstance(each, Exchange) for each in objects()))
        finally:
            gc.enable()


async def test_requests_reach_the_upstream_byte_by_byte() -> None:
    body = b'{ "model":"fake" , "messages":[],"temperature":1.0e0, "zzz": {"unknown": [1 ]} }\n'
    async with relaying() as relay:
        await relay.post(CHAT + "?api-version=1%2F2&x", body, "key=a")
        record = relay.fake.calls("a")[0]
        assert record.body == body
        assert record.target == "/v1/chat/completions?api-version=1%2F2&x"
        assert record.headers.get("content-length") == str(len(body))
        large = b'{"model":"fake","pad":"' + b"x" * 3_000_000 + b'"}'
        assert (await relay.post(CHAT, large, "key=b")).status == 200
        assert relay.fake.calls("b")[0].body == large


async def test_an_alias_and_our_own_field_are_all_that_changes() -> None:
    async with relaying() as relay:
        relay.aliases = {"gpt-4o": "fake"}
        body = b'{"model":"gpt-4o","messages":[],"temperature":1.0e0,"parrot":{"session":"s"}}'
        await relay.post(CHAT, body, "key=a")
        sent = relay.fake.calls("a")[0].body
        assert sent == b'{"model":"fake","messages":[],"temperature":1.0e0}'


@pytest.mark.parametrize("fault", ["drop", "half", "truncate", "eof"])
@pytest.mark.parametrize("path", [CHAT, "/completions"])
async def test_a_broken_stream_ends_in_an_error_event(path: str, fault: str) -> None:
    async with relaying() as relay:
        whole = await relay.post_direct(path, STREAM, "chunks=10")
        answer = await relay.post(path, STREAM, f"chunks=10, fault={fault}, after=3, key=a")
        assert answer.status == 200
        events = answer.body.split(b"\n\n")
        assert events[:3] == whole.body.split(b"\n\n")[:3]
        error = msgspec.json.decode(events[3].removeprefix(b"data: "))["error"]
        assert error["code"] == "upstream_error"
        assert events[4:] == [b"data: [DONE]", b""]
        assert len(relay.fake.calls("a")) == 1


async def test_a_stream_that_falls_silent_ends_in_an_error_event() -> None:
    async with relaying(read_timeout_s=1.0) as relay:
        answer = await relay.post(CHAT, STREAM, "fault=stall, after=2, key=a")
        assert b'"code":"upstream_timeout"' in answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n")
        await relay.fake.wait_for("a", ended="aborted")


async def test_a_call_that_takes_too_long_ends_with_the_deadline() -> None:
    async with relaying() as relay:
        relay.timeout_s = 1.0
        answer = await relay.post(CHAT, STREAM, "fault=stall, after=2, key=a")
        assert b'"code":"timeout"' in answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n")
        await relay.fake.wait_for("a", ended="aborted")
        plain = await relay.post(CHAT, BODY, "fault=stall, key=b")
        assert plain.status == 504
        await relay.fake.wait_for("b", ended="aborted")


async def test_usage_is_counted() -> None:
    async with relaying() as relay:
        await relay.post(CHAT, BODY)
        await relay.post(CHAT, STREAM, "usage=1, chunks=9")
        await relay.post(CHAT, STREAM, "chunks=9")
        await relay.post("/responses", STREAM)
        await relay.post(CHAT, BODY, "status=400")
        totals = relay.upstream.usage.to_dict()
        assert totals == {
            "calls": 4, "unmetered": 1, "prompt_tokens": 21, "completion_tokens": 19,
            "cached_tokens": 6,
        }  # fmt: skip


# -- the client goes away


async def _left(relay: Relay, key: str, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    await relay.fake.wait_for(key, ended="aborted")
    await until(lambda: relay.upstream.slots.held == 0)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_leaving_before_the_first_byte(body: dict[str, Any]) -> None:
    async with relaying() as relay:
        writer = await relay.open(CHAT, body, "first_ms=60000, key=a")
        await relay.fake.wait_for("a", ended="running")
        await _left(relay, "a", writer)


async def test_leaving_in_mid_stream() -> None:
    async with relaying() as relay:
        reader, writer = await relay.open_both(CHAT, STREAM, "chunks=1000, delay_ms=20, key=a")
        await reader.readuntil(b"data:")
        await _left(relay, "a", writer)


async def test_done_waits_a_moment_for_the_end_of_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Servers write the terminating chunk by itself; here both go on in one write."""
    monkeypatch.setattr(passthrough, "_END_TIMEOUT_S", 10.0)
    ends: list[bytes] = []
    end_stream = Exchange.end_stream

    async def noted(self: Exchange, data: bytes = b"") -> None:
        ends.append(data)
        await end_stream(self, data)

    monkeypatch.setattr(Exchange, "end_stream", noted)
    async with relaying() as relay:
        answers = [
            await relay.post(CHAT, STREAM, "end_ms=20, delay_ms=5, chunks=3") for _ in range(2)
        ]
        direct = await relay.post_direct(CHAT, STREAM, "chunks=3")
        assert [answer.body for answer in answers] == [direct.body] * 2
        assert [data.endswith(b"data: [DONE]\n\n") for data in ends] == [True, True]


async def test_done_does_not_wait_for_long() -> None:
    async with relaying() as relay:
        reader, writer = await relay.open_both(CHAT, STREAM, "end_ms=60000, chunks=3, key=a")
        async with asyncio.timeout(60):
            await reader.readuntil(b"data: [DONE]\n\n")
        assert relay.fake.calls("a")[0].ended == "running"
        await _left(relay, "a", writer)


async def test_leaving_while_waiting_in_line() -> None:
    async with relaying(max_concurrency=1) as relay:
        first = await relay.open(CHAT, BODY, "first_ms=60000, key=a")
        await relay.fake.wait_for("a", ended="running")
        second = await relay.open(CHAT, BODY, "key=b")
        await until(lambda: relay.upstream.slots.waiting == 1)
        second.transport.abort()
        await until(lambda: relay.upstream.slots.waiting == 0)
        await _left(relay, "a", first)
        assert not relay.fake.calls("b")


async def test_leaving_while_waiting_for_a_retry() -> None:
    async with relaying(backoff_s=30.0, max_backoff_s=60.0) as relay:
        writer = await relay.open(CHAT, BODY, "status=503, key=a")
        await relay.fake.wait_for("a", ended="complete")
        await until(lambda: relay.upstream.retries == 1)
        writer.transport.abort()
        await until(lambda: relay.upstream.slots.held == 0)
        assert len(relay.fake.calls("a")) == 1


async def test_a_client_that_does_not_read_holds_the_upstream_back() -> None:
    async with relaying() as relay:
        reader, writer = await relay.open_both(CHAT, STREAM, "chunks=20000, size=2000, key=a")
        await reader.readuntil(b"data:")
        record = relay.fake.calls("a")[0]
        with pytest.raises(TimeoutError):
            await relay.fake.wait_for("a", ended="complete", timeout_s=0.3)
        assert record.ended == "running"
        await _left(relay, "a", writer)


# -- other routes


async def test_any_other_route_is_passed() -> None:
    async with relaying() as relay:
        form = (
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nfake\r\n'
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
            b"Content-Type: audio/wav\r\n\r\n\x00\x01\xff\r\n--b--\r\n"
        )
        content_type = "multipart/form-data; boundary=b"
        answer = await relay.post("/audio/transcriptions", form, "key=a", content_type=content_type)
        assert answer.status == 200
        assert relay.fake.calls("a")[0].body == form
        assert answer.body == form
        relay.aliases = {"fake": "other"}
        refused = await relay.post("/audio/transcriptions", form, "", content_type=content_type)
        assert refused.status == 400
        assert refused.json["error"]["param"] == "model"
        answer = await relay.post("/embeddings", {"model": "fake", "input": "x"}, "key=e")
        assert relay.fake.calls("e")[0].body == b'{"model":"other","input":"x"}'
        for method in ("GET", "DELETE", "PUT", "HEAD"):
            async with relay.http.request(
                method, f"{relay.url}/files/x%20y?limit=2", headers={"x-fake": "key=m"}
            ) as response:
                assert response.status == 200
        assert [record.method for record in relay.fake.calls("m")] == [
            "GET", "DELETE", "PUT", "HEAD"]  # fmt: skip
        assert relay.fake.calls("m")[0].target == "/v1/files/x%20y?limit=2"


@pytest.mark.parametrize("path", [CHAT, "/files"])
async def test_a_long_answer_is_streamed_with_its_length(path: str) -> None:
    body = {**BODY, "pad": "x" * 6_000_000}
    async with relaying() as relay:
        direct = await relay.post_direct(path, body, "size=6000000")
        answer = await relay.post(path, body, "size=6000000")
        assert len(answer.body) > 6_000_000
        assert answer.body == direct.body
        assert answer.headers["content-length"] == str(len(direct.body))


async def test_a_long_answer_that_breaks_off_is_never_a_short_success() -> None:
    async with relaying() as relay:
        with pytest.raises(aiohttp.ClientPayloadError):
            await relay.post(CHAT, BODY, "size=12000000, fault=truncate, key=a")
        assert len(relay.fake.calls("a")) == 1
