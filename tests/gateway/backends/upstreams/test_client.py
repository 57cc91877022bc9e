"""An upstream behind real sockets: retries, breaker, time-outs, headers, queue, discovery."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest
from harness.gateway.relaying import relaying, started
from harness.scripted_upstream import (
    Answer,
    ScriptedUpstream,
    chat_document,
    document,
    error,
    event_stream,
)
from harness.waiting import until

from parrot_gateway.backends.upstreams.client import Upstream, UpstreamRequest
from parrot_gateway.backends.upstreams.response import WHOLE_BODY_LIMIT
from parrot_gateway.exceptions import OverloadedError, UpstreamError, UpstreamTimeoutError
from parrot_gateway.routing.model_directory import Catalog
from parrot_gateway.settings.model import UpstreamSettings

BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}
CHAT = "/chat/completions"


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_passing_failures_are_retried(status: int) -> None:
    async with relaying() as relay:
        answer = await relay.post(CHAT, BODY, f"status={status}, times=2, key=a")
        assert answer.status == 200
        assert "x-should-retry" not in answer.headers
        assert len(relay.fake.calls("a")) == 3
        assert relay.upstream.retries == 2


async def test_a_key_that_is_refused_is_the_gateways_own_fault() -> None:
    async with relaying(max_retries=2) as relay:
        answer = await relay.post(CHAT, BODY, "status=401, key=a")
        error = answer.json["error"]
        assert (answer.status, error["code"]) == (502, "upstream_key_refused")
        assert "'fake' refuses the key that this gateway has for it" in error["message"]
        assert "FAKE_API_KEY" in error["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert len(relay.fake.calls("a")) == 1
    async with relaying(forward_authorization=True) as relay:
        assert (await relay.post(CHAT, BODY, "status=401")).status == 401


@pytest.mark.parametrize("status", [400, 403, 404, 409, 422, 501])
async def test_other_statuses_pass_at_once(status: int) -> None:
    async with relaying() as relay:
        direct = await relay.post_direct(CHAT, BODY, f"status={status}")
        answer = await relay.post(CHAT, BODY, f"status={status}, key=a")
        assert (answer.status, answer.body) == (status, direct.body)
        assert "x-should-retry" not in answer.headers
        assert len(relay.fake.calls("a")) == 1


async def test_exhausted_retries_pass_the_last_answer_and_tell_the_client() -> None:
    async with relaying(max_retries=1) as relay:
        direct = await relay.post_direct(CHAT, BODY, "status=503")
        answer = await relay.post(CHAT, BODY, "status=503, key=a")
        assert (answer.status, answer.body) == (503, direct.body)
        assert answer.headers["x-should-retry"] == "false"
        assert len(relay.fake.calls("a")) == 2


async def test_whose_retries_are_used_up_is_told_once() -> None:
    async with relaying(max_retries=1) as relay:
        answer = await relay.post(CHAT, BODY, "status=503, should_retry=true")
        assert answer.headers.getall("x-should-retry") == ["false"]


async def test_without_retries_of_ours_the_client_keeps_its_own_rule() -> None:
    async with relaying(max_retries=0) as relay:
        answer = await relay.post(CHAT, BODY, "status=503, key=a")
        assert answer.status == 503
        assert "x-should-retry" not in answer.headers
        assert len(relay.fake.calls("a")) == 1


async def test_retry_after_is_honoured() -> None:
    async with relaying() as relay:
        answer = await relay.post(CHAT, BODY, "status=429, retry_after_ms=80, times=1, key=a")
        assert answer.status == 200
        first, second = relay.fake.calls("a")
        assert second.started_at - first.started_at >= 0.08


async def test_a_retry_after_beyond_our_patience_goes_to_the_client() -> None:
    async with relaying(max_backoff_s=0.5) as relay:
        answer = await relay.post(CHAT, BODY, "status=429, retry_after=2, key=a")
        assert answer.status == 429
        assert answer.headers["retry-after"] == "2"
        assert "x-should-retry" not in answer.headers
        assert len(relay.fake.calls("a")) == 1


async def test_no_retry_goes_beyond_the_clients_own_time_limit() -> None:
    async with relaying(backoff_s=5.0, max_backoff_s=60.0) as relay:
        answer = await relay.post(CHAT, BODY, "status=503, key=a", x_stainless_read_timeout="1.0")
        assert answer.status == 503
        assert len(relay.fake.calls("a")) == 1


@pytest.mark.parametrize("patience", ["0", "-1", "nan", "inf", "soon"])
async def test_a_time_limit_that_is_none_does_not_count(patience: str) -> None:
    async with relaying() as relay:
        script = "status=503, times=1, key=a"
        answer = await relay.post(CHAT, BODY, script, x_stainless_read_timeout=patience)
        assert answer.status == 200


async def test_the_upstreams_word_on_retrying_counts() -> None:
    async with relaying() as relay:
        await relay.post(CHAT, BODY, "status=503, should_retry=false, key=no")
        assert len(relay.fake.calls("no")) == 1
        await relay.post(CHAT, BODY, "status=400, should_retry=true, key=yes")
        assert len(relay.fake.calls("yes")) == 3


@pytest.mark.parametrize("fault", ["reset", "drop", "half", "truncate"])
async def test_broken_answers_are_retried_before_anything_is_passed_on(fault: str) -> None:
    async with relaying() as relay:
        answer = await relay.post(CHAT, BODY, f"fault={fault}, times=1, key=a, size=4000")
        assert answer.status == 200
        assert len(relay.fake.calls("a")) == 2


async def test_a_lost_connection_is_tried_again() -> None:
    async with relaying(backoff_s=0.001) as relay:
        assert (await relay.post(CHAT, BODY, "fault=reset, key=a")).status == 502
        assert len(relay.fake.calls("a")) == 3


async def test_a_second_loss_is_not_tried_again_where_the_pause_is_too_long() -> None:
    async with relaying(backoff_s=60.0, max_backoff_s=60.0, read_timeout_s=5.0) as relay:
        assert (await relay.post(CHAT, BODY, "fault=reset, key=a")).status == 502
        # The first time it may have been an idle connection, which takes no pause.
        assert len(relay.fake.calls("a")) == 2


async def test_an_answer_that_is_not_waited_for_is_aborted() -> None:
    with ScriptedUpstream() as scripted:
        gate = scripted.gate()
        failing = dataclasses.replace(event_stream(b"data: x\n\n", gate), status=503)
        model = scripted.script(failing, document(chat_document()))
        async with relaying(url=scripted.base_url) as relay:
            assert (await relay.post(CHAT, {**BODY, "model": model})).status == 200
            assert len(scripted.calls(model)) == 2
            await until(scripted.calls(model)[0].aborted.is_set)


async def test_a_stream_that_breaks_before_its_first_event_is_retried() -> None:
    async with relaying() as relay:
        for fault in ("drop", "truncate", "eof"):
            answer = await relay.post(CHAT, STREAM, f"fault={fault}, after=0, times=1, key={fault}")
            assert answer.status == 200
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert b"error" not in answer.body
            assert len(relay.fake.calls(fault)) == 2


async def test_no_connection_is_a_502_in_openais_shape() -> None:
    async with relaying(url="http://127.0.0.1:1/v1") as relay:
        answer = await relay.post(CHAT, BODY)
        assert answer.status == 502
        error = answer.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "upstream_error"
        assert "'fake'" in error["message"]
        assert "127.0.0.1" not in error["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert relay.upstream.retries == 2


async def test_what_is_not_http_is_a_502() -> None:
    async with relaying() as relay:
        answer = await relay.post(CHAT, BODY, "fault=garbage, key=a")
        assert answer.status == 502


async def test_silence_is_a_504_and_not_retried() -> None:
    async with relaying(read_timeout_s=0.5) as relay:
        answer = await relay.post(CHAT, BODY, "fault=stall, key=a")
        assert answer.status == 504
        assert answer.json["error"]["code"] == "upstream_timeout"
        assert len(relay.fake.calls("a")) == 1
        await relay.fake.wait_for("a", ended="aborted")


async def test_the_breaker_opens_on_failures_and_closes_again() -> None:
    settings = {"breaker_failures": 3, "breaker_open_s": 60.0, "breaker_successes": 1}
    async with relaying(max_retries=0, **settings) as relay:
        for _ in range(3):
            assert (await relay.post(CHAT, BODY, "status=503, key=a")).status == 503
        refused = await relay.post(CHAT, BODY, "key=b")
        assert refused.status == 503
        assert refused.json["error"]["code"] == "upstream_unavailable"
        assert float(refused.headers["retry-after"]) > 0
        assert not relay.fake.calls("b")
        assert relay.upstream.describe()["breaker"] == "open"
        # Its time is up.
        relay.upstream._breaker.open_s = 0.0
        assert relay.upstream.describe()["breaker"] == "half_open"
        assert (await relay.post(CHAT, BODY, "key=c")).status == 200
        assert relay.upstream.describe()["breaker"] == "closed"


async def test_answers_in_between_keep_the_breaker_closed() -> None:
    async with relaying(max_retries=0, breaker_failures=2) as relay:
        for _ in range(3):
            assert (await relay.post(CHAT, BODY, "status=500")).status == 500
            assert (await relay.post(CHAT, BODY)).status == 200
        assert relay.upstream.describe()["breaker"] == "closed"


async def test_the_first_bytes_of_a_stream_close_a_half_open_breaker() -> None:
    settings = {"breaker_failures": 1, "breaker_open_s": 0.01, "breaker_successes": 1}
    async with relaying(max_retries=0, **settings) as relay:
        assert (await relay.post(CHAT, BODY, "status=503")).status == 503
        await until(lambda: relay.upstream.describe()["breaker"] == "half_open")
        reader, writer = await relay.open_both(CHAT, STREAM, "fault=stall, after=1, key=a")
        async with asyncio.timeout(60):
            await reader.readuntil(b"data: ")
        assert relay.upstream.describe()["breaker"] == "closed"
        writer.close()
        await relay.fake.wait_for("a", ended="aborted")


async def test_a_caller_that_leaves_a_half_open_breaker_makes_room_for_the_next() -> None:
    settings = {"breaker_failures": 1, "breaker_open_s": 0.01, "breaker_successes": 1}
    async with relaying(max_retries=0, **settings) as relay:
        assert (await relay.post(CHAT, BODY, "status=503")).status == 503
        await until(lambda: relay.upstream.describe()["breaker"] == "half_open")
        writer = await relay.open(CHAT, BODY, "fault=stall, key=a")
        await relay.fake.wait_for("a", ended="running")
        refused = await relay.post(CHAT, BODY, "key=b")
        assert refused.json["error"]["code"] == "upstream_unavailable"
        writer.close()
        await relay.fake.wait_for("a", ended="aborted")
        await until(lambda: relay.upstream.slots.held == 0)
        assert relay.upstream.describe()["breaker"] == "half_open"
        assert (await relay.post(CHAT, BODY, "key=c")).status == 200
        assert relay.upstream.describe()["breaker"] == "closed"


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [("status=500", 500, "fake"), ("fault=reset", 502, "upstream_error")],
)
async def test_what_opens_the_breaker_is_told_and_not_tried_again(
    script: str, status: int, code: str
) -> None:
    async with relaying(breaker_failures=2, max_retries=5) as relay:
        answer = await relay.post(CHAT, BODY, f"{script}, key=a")
        assert (answer.status, answer.json["error"]["code"]) == (status, code)
        assert len(relay.fake.calls("a")) == 2
        assert relay.upstream.retries == 1
        assert relay.upstream.describe()["breaker"] == "open"


async def test_refusals_of_the_upstream_never_open_the_breaker() -> None:
    async with relaying(max_retries=0, breaker_failures=1) as relay:
        for status in (400, 401, 404, 422, 429):
            for _ in range(3):
                answer = await relay.post(CHAT, BODY, f"status={status}")
                assert answer.status == (502 if status == 401 else status)
        assert relay.upstream.describe()["breaker"] == "closed"
        assert relay.upstream.describe()["breaker_openings"] == 0


async def test_streams_that_break_in_the_middle_open_the_breaker() -> None:
    async with relaying(breaker_failures=2) as relay:
        for _ in range(2):
            await relay.post(CHAT, STREAM, "fault=truncate, after=3")
        assert relay.upstream.describe()["breaker"] == "open"


async def test_concurrency_is_bounded_and_the_line_too() -> None:
    async with relaying(max_concurrency=2, max_waiting=1) as relay:
        gate = relay.fake.gate()
        held = {**BODY, "model": relay.fake.script(document(chat_document(), before=gate))}
        running = [asyncio.create_task(relay.post(CHAT, held)) for _ in range(2)]
        await until(lambda: relay.upstream.slots.held == 2)
        waiting = asyncio.create_task(relay.post(CHAT, BODY, "key=w"))
        await until(lambda: relay.upstream.slots.waiting == 1)
        refused = await relay.post(CHAT, BODY, "key=x")
        assert refused.status == 503
        assert refused.json["error"]["code"] == "engine_overloaded"
        assert refused.headers["retry-after"]
        assert not relay.fake.calls("w")
        gate.open()
        answers = await asyncio.gather(*running, waiting)
        assert [answer.status for answer in answers] == [200, 200, 200]


async def test_who_waits_in_line_is_refused_once_the_upstream_is_drained() -> None:
    async with relaying(max_concurrency=1) as relay:
        held = asyncio.create_task(relay.post(CHAT, BODY, "fault=stall, key=held"))
        await until(lambda: len(relay.fake.calls("held")) == 1)
        waiting = asyncio.create_task(relay.post(CHAT, BODY, "key=late"))
        await until(lambda: relay.upstream.slots.waiting == 1)
        assert relay.upstream.set_drained(relay.upstream.name, drained=True)
        held.cancel()
        answer = await waiting
        assert (answer.status, relay.fake.calls("late")) == (503, [])


async def test_waiting_in_line_ends_with_the_clients_patience() -> None:
    async with relaying(max_concurrency=1) as relay:
        gate = relay.fake.gate()
        held = {**BODY, "model": relay.fake.script(document(chat_document(), before=gate))}
        running = asyncio.create_task(relay.post(CHAT, held))
        await until(lambda: relay.upstream.slots.held == 1)
        answer = await relay.post(CHAT, BODY, "key=w", x_stainless_read_timeout="0.05")
        assert answer.status == 503
        gate.open()
        assert (await running).status == 200
        assert not relay.fake.calls("w")


async def test_headers_that_pass_and_headers_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_API_KEY", "the-operators-key")
    async with relaying() as relay:
        answer = await relay.post(
            CHAT, BODY, "key=a",
            authorization="Bearer the-callers-key", x_api_key="also-the-callers",
            openai_organization="the-callers-org", x_custom="kept", cookie="c=1",
            x_early="dropped", x_parrot_session="s",
            connection="keep-alive, x-hop, x-early", x_hop="dropped",
        )  # fmt: skip
        sent = relay.fake.calls("a")[0].headers
        assert sent["authorization"] == "Bearer the-operators-key"
        assert sent["x-custom"] == "kept"
        assert sent["host"] == f"127.0.0.1:{relay.fake.port}"
        absent = {
            "x-api-key",
            "openai-organization",
            "cookie",
            "x-parrot-session",
            "x-hop",
            "x-early",
        }
        assert not absent & sent.keys()
        assert "the-callers" not in str(sent)
        got = answer.headers
        assert got["x-upstream-request-id"] == "fake-req"
        assert got["x-request-id"].startswith("req_")
        assert len(got.getall("x-request-id")) == 1
        assert got["x-ratelimit-remaining-requests"] == "42"
        assert got["openai-organization"] == "fake-org"
        assert len(got.getall("openai-processing-ms")) == 1
        assert got["x-upstream-processing-ms"] == "7"
        assert got["x-parrot-engine"] == "fake"
        assert "server" not in got
        assert "set-cookie" not in got


async def test_the_callers_key_is_forwarded_only_where_that_is_meant() -> None:
    given = {"authorization": "Bearer the-callers-key"}
    async with relaying() as relay:  # the gateway has a key of its own: it must not leave
        await relay.post(CHAT, BODY, "key=a", **given)
        assert relay.fake.calls("a")[0].headers.get("authorization") is None
    async with relaying(gateway_has_key=False) as relay:
        await relay.post(CHAT, BODY, "key=a", **given)
        assert relay.fake.calls("a")[0].headers.get("authorization") == "Bearer the-callers-key"
    async with relaying(forward_authorization=True) as relay:
        await relay.post(CHAT, BODY, "key=a", **given)
        assert relay.fake.calls("a")[0].headers.get("authorization") == "Bearer the-callers-key"


async def test_keys_are_in_no_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_API_KEY", "the-operators-key")
    async with relaying(url="http://user:password@127.0.0.1:1/v1") as relay:
        described = str(relay.upstream.describe()) + repr(relay.upstream)
        assert "the-operators-key" not in described
        assert "password" not in described


async def test_fallback_is_asked_when_the_upstream_cannot_answer() -> None:
    async with relaying(breaker_failures=100) as relay:
        relay.use_fallback = True
        scripts = ("status=503", "status=501", "status=429", "fault=reset", "fault=truncate")
        for script in scripts:
            answer = await relay.post(CHAT, BODY, script)
            assert answer.json == {"by": "fallback"}
        assert len(relay.fallbacks) == len(scripts)
        # A refusal is an answer, and a stream that has begun cannot begin again.
        assert (await relay.post(CHAT, BODY, "status=400")).status == 400
        broken = await relay.post(CHAT, STREAM, "fault=truncate")
        assert b"upstream_error" in broken.body
        assert len(relay.fallbacks) == len(scripts)


async def test_models_are_asked_for() -> None:
    with ScriptedUpstream("m-1", "m-2") as fake:
        upstream = Upstream(UpstreamSettings(name="fake", url=fake.base_url))
        assert not upstream.ready
        assert not upstream.serves("m-1")
        async with started(upstream):
            await asyncio.wait_for(upstream.wait_ready(), 60)
            assert upstream.models() == ("m-1", "m-2")
            assert upstream.serves("m-2")
            assert not upstream.serves("m-3")
            assert not upstream.serves_any()


async def test_an_upstream_that_is_down_at_start_is_asked_again() -> None:
    with ScriptedUpstream("late") as fake:
        fake.go_down()
        async with started(Upstream(UpstreamSettings(name="fake", url=fake.base_url))) as upstream:
            await until(lambda: upstream.failures == 0 and not upstream.ready)
            assert upstream.models() == ()
            fake.go_up()
            await asyncio.wait_for(upstream.wait_ready(), 60)
            assert upstream.serves("late")


@pytest.mark.parametrize(
    ("status", "path", "advice"),
    [
        (401, "/v1", "set MY_VLLM_API_KEY"),
        (404, "", "end in /v1?"),
        (404, "/v1", "upstreams.models"),
    ],
)
async def test_why_models_are_not_known(
    status: int, path: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedUpstream() as server:
        server.answer_all(error(status))
        url = server.base_url.removesuffix("/v1") + path
        async with started(Upstream(UpstreamSettings(name="my-vllm", url=url))) as upstream:
            await until(lambda: f"answered {status}" in caplog.text)
            assert advice in caplog.text
            assert not upstream.ready
            # Callers are told as well, and not that a model is being loaded.
            catalog = Catalog(list, {"my-vllm": upstream}, {})
            for model in ("some-model", "my-vllm"):
                with pytest.raises(UpstreamError, match=f"'my-vllm' .*status {status}") as told:
                    catalog.resolve(model)
                assert (told.value.status, told.value.should_retry) == (502, False)


async def test_a_url_without_v1_is_told_to_callers() -> None:
    with ScriptedUpstream() as server:
        server.answer_all(document({"detail": "Not Found"}, 404))
        settings = UpstreamSettings(
            name="fake", url=server.base_url.removesuffix("/v1"), models="*"
        )
        async with started(Upstream(settings)) as upstream:
            with pytest.raises(UpstreamError, match="should probably end in /v1"):
                await upstream.request(UpstreamRequest("POST", "/v1/chat/completions", [], b"{}"))


async def test_a_cancelled_request_is_aborted_at_the_upstream() -> None:
    async with relaying() as relay:
        headers = [(b"x-fake", b"fault=stall, key=a")]
        task = asyncio.create_task(
            relay.upstream.request(UpstreamRequest("POST", "/v1/chat/completions", headers, b"{}"))
        )
        await relay.fake.wait_for("a", ended="running")
        task.cancel()
        await relay.fake.wait_for("a", ended="aborted")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert relay.upstream.slots.held == 0


async def test_a_connection_with_an_impossible_head_is_closed() -> None:
    async with relaying() as relay:
        model = relay.fake.script(Answer(999, length=10, stall=True))
        body = msgspec.json.encode({"model": model})
        # NOTE: the error is kept: its traceback would keep the answer, too.
        with pytest.raises(UpstreamError, match="understood") as raised:
            await relay.upstream.request(UpstreamRequest("POST", "/v1/chat/completions", [], body))
        await relay.fake.wait_for(model, ended="aborted")
        assert raised.value.status == 502


async def test_a_stream_of_known_length_is_passed_on_as_it_comes() -> None:
    first, rest = b"data: 1\n\n", b"data: [DONE]\n\n"
    async with relaying() as relay:
        received = relay.fake.gate()
        parts = (first, received, rest)
        model = relay.fake.script(Answer(parts=parts, content_type="text/event-stream"))
        body = msgspec.json.encode({"model": model})
        async with asyncio.timeout(60):
            response = await relay.upstream.request(
                UpstreamRequest("POST", "/v1/chat/completions", [], body)
            )
            assert (response.first, response.at_eof) == (first, False)
            received.open()
            assert await response.read() == rest
        # The slot is released once.
        response.close()
        response.close()
        assert relay.upstream.slots.held == 0


async def test_answers_that_are_looked_into_are_asked_for_uncompressed() -> None:
    async with relaying() as relay:
        await relay.post(CHAT, BODY, "key=a", accept_encoding="gzip")
        await relay.post("/images", BODY, "key=b", accept_encoding="gzip")
        encodings = [relay.fake.calls(key)[0].headers.get("accept-encoding") for key in "ab"]
        assert encodings == ["identity", "gzip"]


async def test_long_answers_are_counted_too() -> None:
    async with relaying() as relay:
        answer = await relay.post(CHAT, BODY, f"size={WHOLE_BODY_LIMIT + 1}")
        assert len(answer.body) > WHOLE_BODY_LIMIT
        assert relay.upstream.usage.to_dict()["calls"] == 1


async def test_errors_of_a_bare_request() -> None:
    settings = UpstreamSettings(
        name="fake", url="http://127.0.0.1:1/v1", models="*", max_retries=0, breaker_failures=1
    )
    upstream = Upstream(settings)
    with pytest.raises(UpstreamError, match="closed"):
        await upstream.request(UpstreamRequest("GET", "/v1/files", [], b""))
    async with started(upstream):
        with pytest.raises(OverloadedError):
            await upstream.request(UpstreamRequest("GET", "/v1/files", [], b""))
        assert issubclass(UpstreamTimeoutError, UpstreamError)
