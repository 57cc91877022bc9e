"""One record a call, of which each is handed to every sink once, when its call has ended."""

from __future__ import annotations

import msgspec
import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, read_head, serving
from harness.scripted_upstream import (
    ScriptedUpstream,
    chat_document,
    chat_events,
    document,
    error,
    event_stream,
)
from harness.waiting import until
from parrot_engine.protocol import Failed

from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.settings.model import UpstreamSettings
from parrot_gateway.telemetry import call_record
from parrot_gateway.telemetry.call_record import (
    CallObserver,
    CallRecord,
    CallRecords,
    WantedContents,
)
from parrot_gateway.telemetry.content.content import CallContent

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}


def recording(service: Service) -> list[CallRecord]:
    """The records of calls that end from now on."""
    ended: list[CallRecord] = []
    service.gateway.call_records.sinks.append(ended.append)
    return ended


async def test_a_call_to_an_own_engine() -> None:
    async with serving(ScriptedRemoteEngine(cached_tokens=3)) as service:
        ended = recording(service)
        _, headers, body = await service.post("/v1/chat/completions", {**CHAT, "model": "other"})
        (record,) = ended
    usage = msgspec.json.decode(body)["usage"]
    assert record.request_id == headers[b"x-request-id"].decode()
    assert record.call_id == "call_" + record.request_id[-24:]
    assert (record.path, record.tenant) == ("/v1/chat/completions", "default")
    assert (record.model, record.served_model, record.engine) == ("other", "m", "scripted")
    assert (record.reason, record.explanation) == ("load", "load")
    assert record.prompt_tokens == usage["prompt_tokens"]
    assert record.output_tokens == usage["completion_tokens"]
    assert record.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert (record.status, record.finish_reason, record.streamed) == (200, "stop", False)
    assert record.error_code is record.error_message is record.session is None
    assert record.submitted is not None
    assert record.placed is not None
    assert record.first_token is not None
    assert record.ended is not None
    times = [record.started, record.submitted, record.placed, record.first_token, record.ended]
    assert times == sorted(times)
    assert record.queued_s == pytest.approx(record.placed - record.submitted)


async def test_live_calls_and_clients_that_leave() -> None:
    engine = ScriptedRemoteEngine(automatic=False)
    async with serving(engine) as service:
        ended = recording(service)
        calls = service.gateway.call_records
        stream = msgspec.json.encode({**CHAT, "stream": True})
        reader, writer = await service.send("/v1/chat/completions", stream)
        await until(lambda: engine.contexts)
        (record,) = calls.live()
        assert (record.model, record.engine, record.ended) == ("m", "scripted", None)
        engine.step()
        engine.step()
        assert (await read_head(reader))[0] == 200
        writer.close()
        await until(lambda: ended)
        assert calls.live() == []
    assert ended == [record]
    assert (record.client_left, record.status, record.streamed) == (True, 200, True)
    assert record.prompt_tokens == 21
    assert record.output_tokens in (1, 2), "both steps, or the one that the client read"
    assert record.error_code is None


async def test_refusals_and_failures_are_what_the_client_got() -> None:
    def script(prompt: list[int], sampling: object) -> list[int | Failed]:
        return [104, Failed(0, "engine_error", "the device is gone")]

    async with serving(ScriptedRemoteEngine(script)) as service:
        ended = recording(service)
        refused = await service.post("/v1/chat/completions", {**CHAT, "max_tokens": "many"})
        malformed = await service.post("/v1/messages", b"{")
        failed = await service.post("/v1/chat/completions", CHAT)
        streamed = await service.post("/v1/chat/completions", {**CHAT, "stream": True})
    for (status, _, body), record in zip((refused, malformed, failed), ended, strict=False):
        shown = msgspec.json.decode(body)["error"]
        assert (record.status, record.error_message) == (status, shown["message"])
        assert record.error_code == shown.get("code", record.error_code)
    last = msgspec.json.decode(streamed[2].split(b"data: ")[-2])
    assert ended[3].status == 200
    assert ended[3].error_message == last["error"]["message"]
    assert ended[3].output_tokens == 1


async def test_a_deferred_call_ends_with_the_call() -> None:
    engine = ScriptedRemoteEngine(automatic=False)
    async with serving(engine) as service:
        ended = recording(service)
        deferred = {**CHAT, "parrot": {"session": "s", "output": "o", "defer": True}}
        _, headers, _ = await service.post("/v1/chat/completions", deferred)
        await until(lambda: engine.contexts)
        assert ended == []
        (record,) = service.gateway.call_records.live()
        assert record.request_id == headers[b"x-request-id"].decode()
        assert record.call_id == headers[b"x-parrot-call"].decode()
        assert record.session == headers[b"x-parrot-session"].decode()
        engine.automatic = True
        engine.step()
        await until(lambda: ended)
        follower = {"session": "s", "output": "p", "inputs": {"x": "o"}, "defer": True}
        broken = {**CHAT, "messages": [{"role": "user", "content": "{{x}}"}], "parrot": follower}
        broken["max_tokens"] = 100_000
        await service.post("/v1/chat/completions", broken)
        await until(lambda: len(ended) == 2)
    assert (record.status, record.deferred, record.engine) == (200, True, "scripted")
    assert record.ready is not None
    assert ended[1].status == 400
    assert ended[1].error_code == "context_length_exceeded"


async def test_outputs_of_parrots_own_api_are_calls() -> None:
    async with serving(ScriptedRemoteEngine()) as service:
        ended = recording(service)
        _, _, body = await service.post("/v1/session", {})
        session = msgspec.json.decode(body)
        sampling = {"max_gen_length": 8}
        parameters = [
            {"name": name, "is_output": True, "sampling_config": sampling} for name in "ab"
        ]
        call = {
            "template": "One {{a}} two {{b}}",
            "models": ["m"],
            "model_type": "token_id",
            "parameters": parameters,
            **session,
        }
        status, headers, body = await service.post("/v1/semantic_call", call)
        assert status == 200, body
        await until(lambda: len(ended) == 2)
    assert {record.path for record in ended} == {"/v1/semantic_call"}
    assert {record.request_id for record in ended} == {headers[b"x-request-id"].decode()}
    assert len({record.call_id for record in ended}) == 2
    assert {record.status for record in ended} == {200}


async def test_calls_that_upstreams_answer() -> None:
    with ScriptedUpstream() as upstream:
        settings = UpstreamSettings(name="up", url=upstream.base_url, models="*")
        async with serving(ScriptedRemoteEngine(), upstreams=[settings]) as service:
            (client,) = service.gateway.upstreams.values()
            await client.start()
            ended = recording(service)

            async def post(model: str, **fields: object) -> tuple[int, bytes]:
                status, _, body = await service.post(
                    "/v1/chat/completions", {**CHAT, "model": model, **fields}
                )
                return status, body

            await post(upstream.script(document(chat_document())))
            refused = await post(upstream.script(error(400)))
            await post(upstream.script(event_stream(*chat_events(["a"]))), stream=True)
            broken = await post(
                upstream.script(event_stream(*chat_events(["a"])[:1], cut=True)), stream=True
            )
            await client.close()
    whole, error_, streamed, cut = ended
    assert (whole.engine, whole.reason, whole.output_tokens) == ("up", "upstream", 2)
    assert whole.first_token is not None
    assert error_.status == refused[0]
    assert error_.error_message == msgspec.json.decode(refused[1])["error"]["message"]
    assert (streamed.streamed, streamed.status, streamed.error_message) == (True, 200, None)
    assert cut.error_message is not None
    assert cut.error_message.encode() in broken[1]


@pytest.mark.parametrize("deferred", [False, True], ids=["answered", "deferred"])
async def test_a_call_that_fell_back_is_a_success(deferred: bool) -> None:
    with ScriptedUpstream() as upstream:
        settings = UpstreamSettings(
            name="up", url=upstream.base_url, models="*", max_retries=0, fallback="m"
        )
        async with serving(ScriptedRemoteEngine(), upstreams=[settings]) as service:
            (client,) = service.gateway.upstreams.values()
            await client.start()
            ended = recording(service)
            body: dict[str, object] = {**CHAT, "model": upstream.script(error(503))}
            if deferred:
                body["parrot"] = {"session": "s", "output": "o", "defer": True}
            await service.post("/v1/chat/completions", body)
            await until(lambda: ended)
            await client.close()
    (record,) = ended
    assert (record.status, record.error_code, record.error_message) == (200, None, None)
    assert (record.engine, record.served_model, record.finish_reason) == ("scripted", "m", "stop")
    assert len(upstream.received) == 1


def test_another_try_begins_without_what_the_last_one_left() -> None:
    record = CallRecord("req", "call", 5.0, submitted=6.0)
    observer = CallObserver(record)
    observer.started("one", 0.5, "prefix, with 3 others")
    assert (record.engine, record.placed, record.reason) == ("one", 6.5, "prefix")
    assert record.explanation == "prefix, with 3 others"
    observer.first_token()
    record.fail(GatewayError("The first one broke off."))
    observer.started("two", 2.0, "")
    assert record.error_code is record.error_message is record.first_token is None
    assert (record.engine, record.placed, record.queued_s) == ("two", 8.0, 2.0)
    assert record.reason == "upstream"


def test_keys_are_kept_out_of_errors_and_long_messages_cut() -> None:
    record = CallRecord("req", "call", 0.0)
    record.note_failure("code", "the key sk-0123456789 is wrong" + "x" * 3000)
    assert record.error_message is not None
    assert record.error_message.startswith("the key sk-… is wrongx")
    assert len(record.error_message) == 2000 - len("0123456789") + len("…")


def test_no_more_calls_are_recorded_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_record, "MAX_LIVE", 2)
    calls, ended = CallRecords(), list[str]()
    calls.sinks.append(lambda record: ended.append(record.request_id))
    made = [CallRecord(f"req_{number}", "call", 0.0) for number in range(3)]
    for each in made:
        calls.begin(each, "/v1/completions")
    assert calls.live() == made[:2]
    for each in made:
        each.end()
    assert ended == ["req_0", "req_1"]
    assert calls.live() == []


def test_a_sink_that_raises_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    calls, ended, settled = CallRecords(), list[CallRecord](), list[CallRecord]()

    def broken(records: object) -> None:
        raise ValueError("full")

    calls.sinks += [broken, ended.append]
    calls.batch_sinks += [broken, settled.extend]
    for number in range(100):
        record = CallRecord(f"req_{number}", "call", 0.0)
        calls.begin(record, "/v1/completions")
        record.fail(GatewayError("Something broke."))
        record.end()
        record.end()
    assert [each.request_id for each in ended] == [f"req_{number}" for number in range(100)]
    assert len(settled) == 64
    calls.settle()
    calls.settle()
    assert settled == ended
    assert caplog.text.count("a sink of call records failed") == 2


@pytest.mark.parametrize(
    ("ratio", "excluded", "traceparent", "is_wanted"),
    [
        (1.0, (), b"", True),
        (0.0, (), b"", False),
        (1.0, ("one",), b"", False),
        (1.0, (), b"00-%032x-%016x-00" % (7, 7), False),
        (0.0, (), b"00-%032x-%016x-01" % (7, 7), True),
    ],
)
def test_only_calls_of_exported_traces_hold_what_they_say(
    ratio: float, excluded: tuple[str, ...], traceparent: bytes, is_wanted: bool
) -> None:
    ended: list[CallContent | None] = []
    records = CallRecords(ratio, WantedContents(are_kept=False, exclude_tenants=excluded))
    records.sinks.append(lambda record: ended.append(record.content))
    record = CallRecord("req", "call", 0.0)
    headers = {b"traceparent": traceparent} if traceparent else {}
    records.begin(record, "/v1/chat/completions", headers)
    assert record.content is not None, "the key, and so the tenant, has not been checked yet"
    record.tenant = "one"
    record.take_answer(b"data", False)
    assert (record.content is not None) == is_wanted
    record.take_answer(b"more", True)
    record.end()
    (content,) = ended
    assert (content is not None) == is_wanted
    if content is not None:
        assert content.size_bytes == len(b"datamore")
    assert record.content is None, "records outlive their calls"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/speech", "/v1/*"])
def test_calls_without_text_hold_nothing(path: str) -> None:
    record = CallRecord("req", "call", 0.0)
    CallRecords(1.0, WantedContents(True, ())).begin(record, path)
    assert record.content is None
    plain = CallRecord("req", "call", 0.0)
    CallRecords(1.0).begin(plain, "/v1/chat/completions")
    assert plain.content is None, "nobody asks for content"


def test_a_call_that_is_answered_later_holds_no_answer_to_its_request() -> None:
    records = CallRecords(contents=WantedContents(True, ("other",)))
    for deferred, tenant, size in ((False, "mine", 4), (True, "mine", 0), (False, "other", None)):
        record = CallRecord("req", "call", 0.0, tenant=tenant, deferred=deferred)
        records.begin(record, "/v1/completions")
        record.take_answer(b"data", False)
        content = record.wanted_content()
        assert (content and content.size_bytes) == size
        record.end()


@pytest.mark.parametrize(("status", "becomes"), [(0, 499), (200, 200), (503, 503)])
def test_a_client_that_leaves_has_the_status_that_it_got(status: int, becomes: int) -> None:
    record = CallRecord("req", "call", 0.0, status=status)
    record.leave()
    assert (record.client_left, record.status) == (True, becomes)
    record.fail(GatewayError("It broke.", code="broke"))
    assert record.error_code == "broke"
    record.fail(GatewayError("It broke."))
    assert record.error_code == "server_error"


def test_usage_is_counted_of_calls_that_end_and_of_those_that_fail() -> None:
    record = CallRecord("req", "call", 0.0)
    observer = CallObserver(record)
    observer.ended(Usage(7, 3, 5), "length")
    told = (record.prompt_tokens, record.output_tokens, record.cached_tokens)
    assert (told, record.finish_reason) == ((7, 3, 5), "length")
    observer.failed(GatewayError("It broke."), Usage(8, 4, 6))
    observer.failed(GatewayError("It broke again."))
    told = (record.prompt_tokens, record.output_tokens, record.cached_tokens)
    assert (told, record.finish_reason) == ((8, 4, 6), "length")
