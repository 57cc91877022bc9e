"""The client, the log, the metrics and the trace agree on a call, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from harness.processes import (
    API_KEY,
    DEMO_MODEL,
    GatewayProcess,
    closed_port,
    upstream_settings,
    wait_until,
)
from harness.raw_http import RawConnection, Response
from harness.scripted_upstream import (
    ScriptedUpstream,
    chat_document,
    chat_events,
    data,
    document,
    error,
    event_stream,
)

pytest.importorskip("opentelemetry.sdk", reason="pip install 'parrot-gateway[tracing]'")
from harness.otlp_receiver import Receiver, Span
from prometheus_client.openmetrics.parser import text_string_to_metric_families

CHAT = "/v1/chat/completions"
#: What an upstream repeats in an error.
SECRET = "sk-this-1-is-nobodys-business"
WRONG_KEY = {"message": f"Incorrect API key: {SECRET}", "type": "auth", "code": "wrong_key"}
#: As vLLM writes them: the code is a number.
NUMBERED = {"message": "Not that way.", "type": "BadRequestError", "code": 400}

#: What an upstream answers to the calls of one case each.
UPSTREAM = {
    "answered": document(chat_document()),
    "refused with 401": document({"error": WRONG_KEY}, 401),
    "refused as vLLM does": document({"error": NUMBERED}, 400),
    "refused with 429": error(429),
    "failed with 500": error(500),
    "an error with status 200": document({"error": NUMBERED}),
    "a stream broken off": event_stream(*chat_events(["One"])[:2], cut=True),
    "an error in a stream": event_stream(*chat_events(["One"])[:2], data({"error": WRONG_KEY})),
}
#: Fields of calls to the demo model of one case each.
OWN: dict[str, dict[str, Any]] = {
    "served": {},
    "served as a stream": {"stream": True, "stream_options": {"include_usage": True}},
    "a wrong field": {"temperature": 99},
    "a wrong grammar": {"guided_regex": "("},
    "an unknown model": {"model": "nobody"},
    "a large body": {"user": "x" * 30_000},
}
OTHERS = (
    "no JSON", "a wrong key", "a silent upstream", "an upstream that is not there", "held 1",
    "held 2", "a full gateway", "a client that left", "a producer that failed", "its reader",
    "a line of a batch", "a wrong line of a batch", "an engine killed in a stream",
    "cut short by a drain", "while draining",
)  # fmt: skip
#: These end after the last look at the metrics.
LAST = ("cut short by a drain", "while draining")


class Told(NamedTuple):
    """An answer as the client saw it; an error by its message and its code, or else its type."""

    status: int
    code: str | None = None
    message: str | None = None
    #: Prompt and completion.
    tokens: tuple[int, int] | None = None


class Calls:
    """Calls to one gateway, and what it said of them.

    Attributes:
        told, ids: by case, what the client was told and the id of the request.
        metrics: when all but the last calls had ended: by name and values of labels.
        exemplars: the traces that they name.
        lines, spans: of calls, by the id of the request.
    """

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self.told: dict[str, Told] = {}
        self.ids: dict[str, str] = {}
        self.metrics: dict[tuple[str, ...], float] = {}
        self.exemplars: set[str] = set()
        self.lines: dict[str, dict[str, Any]] = {}
        self.spans: dict[str, Span] = {}

    def connect(self, key: str = API_KEY) -> RawConnection:
        return RawConnection(self.gateway.port, api_key=key)

    def ask(self, case: str, key: str = API_KEY, **fields: Any) -> Response:
        """A chat and its answer."""
        with self.connect(key) as connection:
            answer = connection.ask("POST", CHAT, chat(**fields))
        self.note(case, answer)
        return answer

    def note(self, case: str, answer: Response) -> None:
        """The client of a case got this answer."""
        self.ids[case] = answer.headers["x-request-id"]
        is_stream = answer.headers["content-type"].startswith("text/event-stream")
        if is_stream:
            shown = json.loads([each for each in answer.events if each != "[DONE]"][-1])
        else:
            shown = answer.json
        problem, usage = shown.get("error") or {}, shown.get("usage")
        words = [each for each in (problem.get("code"), problem.get("type")) if each]
        self.told[case] = Told(
            answer.status,
            next((each for each in words if isinstance(each, str)), None),
            problem.get("message"),
            None if usage is None else (usage["prompt_tokens"], usage["completion_tokens"]),
        )

    def begin_stream(self, case: str, **fields: Any) -> RawConnection:
        """A stream of which the first words are there."""
        connection = self.connect()
        connection.send(connection.request("POST", CHAT, chat(stream=True, **fields)))
        found = re.search(rb"x-request-id: (\S+)", connection.read_until(b'"content": "One"'))
        assert found is not None
        self.ids[case] = found[1].decode()
        return connection

    def line_of(self, case: str) -> dict[str, Any]:
        """The log line of a call, once it is there."""
        id_ = self.ids[case]
        wait_until(lambda: f'"{id_}"' in self.gateway.stderr(), f"{case} is in the log")
        (line,) = (each for each in self.gateway.stderr().split("\n") if f'"{id_}"' in each)
        found: dict[str, Any] = json.loads(line)
        return found

    def scrape(self) -> None:
        with self.connect() as connection:
            accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.3"}
            page = connection.ask("GET", "/metrics", None, accept).body.decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                self.metrics[sample.name, *sample.labels.values()] = sample.value
                if sample.exemplar:
                    self.exemplars.add(sample.exemplar.labels["trace_id"])

    def counted(self, name: str, label: int) -> Counter[str]:
        """The values of a counter by one of its labels, those of 0 left out."""
        found: Counter[str] = Counter()
        for (sample, *labels), value in self.metrics.items():
            if sample == name and value:
                found[labels[label]] += int(value)
        return found


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": DEMO_MODEL, "messages": messages, "max_tokens": 4, **fields}


@pytest.fixture(scope="module")
def calls() -> Iterator[Calls]:
    """A call of each case; their gateway has ended, and exported its spans."""
    with Receiver() as receiver, ScriptedUpstream() as upstream:
        url, models = upstream.base_url, {}
        for case, answer in UPSTREAM.items():
            models[case] = upstream.script(answer)
        gates = {case: upstream.gate() for case in ("held 1", "held 2", *LAST, "silent", "left")}
        begin, word, *rest = chat_events(["One"])
        for case in ("held 1", "held 2", "silent"):
            models[case] = upstream.script(document(chat_document(), before=gates[case]))
        for case in ("left", LAST[0]):
            models[case] = upstream.script(event_stream(begin, word, gates[case], *rest))
        silent = models.pop("silent")
        config = {
            "models": [{"model": DEMO_MODEL, "max_batch_size": 4, "num_blocks": 256}],
            "upstreams": [
                {**upstream_settings("up", url, max_retries=0), "models": list(models.values())},
                {**upstream_settings("slow", url, max_retries=0, read_timeout_s=0.2),
                 "models": [silent]},
                {**upstream_settings("none", f"http://127.0.0.1:{closed_port()}", max_retries=0),
                 "models": ["gone"]},
            ],
            "server": {"access_log": True, "max_body_bytes": 20_000, "max_running_calls": 2},
            "telemetry": {"log_format": "json", "traces_endpoint": receiver.url},
        }  # fmt: skip
        with GatewayProcess(config=config, api_key=API_KEY) as gateway:
            calls = Calls(gateway)
            for case, fields in OWN.items():
                calls.ask(case, **fields)
            for case in UPSTREAM:
                calls.ask(case, model=models[case], stream="stream" in case)
            with calls.connect() as connection:
                calls.note("no JSON", connection.ask("POST", CHAT, b"{"))
            calls.ask("a wrong key", key="wrong")
            calls.ask("a silent upstream", model=silent)
            calls.ask("an upstream that is not there", model="gone")
            fill(calls, upstream, models, gates)
            leave(calls, models["left"])
            defer(calls, models["failed with 500"])
            batch(calls)
            kill_engine(calls)
            for case in calls.ids:
                calls.line_of(case)
            calls.scrape()
            drain(calls, models[LAST[0]], gates[LAST[0]])
            gateway.wait()
            for case in (*UPSTREAM, *OWN, *OTHERS):
                calls.lines[case] = calls.line_of(case)
            log = gateway.stderr()
        assert all(json.loads(line)["event"] for line in log.splitlines())
        assert SECRET not in log + str(receiver.spans) + str(calls.metrics)
        of_calls = [each for each in receiver.spans if "parrot.call.id" in each.attributes]
        assert len(of_calls) == log.count('"parrot_gateway.calls"') == len(calls.ids)
        by_id = {each.attributes["parrot.request.id"]: each for each in of_calls}
        calls.spans = {case: by_id[id_] for case, id_ in calls.ids.items()}
        yield calls


def fill(calls: Calls, upstream: ScriptedUpstream, models: dict[str, str], gates: Any) -> None:
    """Send as many calls as the gateway takes, and one more."""
    held = {case: calls.connect() for case in ("held 1", "held 2")}
    for case, connection in held.items():
        connection.send(connection.request("POST", CHAT, chat(model=models[case])))
        upstream.wait_for_calls(models[case])
    calls.ask("a full gateway")
    for case, connection in held.items():
        gates[case].open()
        calls.note(case, connection.read_response())
        connection.close()


def leave(calls: Calls, model: str) -> None:
    calls.begin_stream("a client that left", model=model).close()
    calls.told["a client that left"] = Told(200)
    assert calls.line_of("a client that left")["client_left"]


def defer(calls: Calls, model: str) -> None:
    """A call whose client is answered before it fails, and one that needs its value."""
    fields = {"session": "s", "output": "o", "defer": True}
    deferred = calls.ask("a producer that failed", model=model, parrot=fields)
    reader = {"session": "s", "inputs": {"x": "o"}}
    calls.ask("its reader", parrot=reader, messages=[{"role": "user", "content": "{{x}}"}])
    with calls.connect() as connection:
        shown = connection.ask("GET", f"/v1/variables/{deferred.headers['x-parrot-variable']}")
    assert "scripted 500" in shown.json["error"]["message"]
    # What it would have been.
    calls.told["a producer that failed"] = Told(500, "scripted_500", "scripted 500")


def batch(calls: Calls) -> None:
    base_url = calls.gateway.base_url
    cases = {"a line of a batch": chat(), "a wrong line of a batch": chat(top_p=7)}
    with openai.OpenAI(base_url=base_url, api_key=API_KEY, max_retries=0) as client:
        lines = [
            {"custom_id": case, "method": "POST", "url": CHAT, "body": body}
            for case, body in cases.items()
        ]
        text = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("lines.jsonl", text), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait_until(lambda: client.batches.retrieve(made.id).status == "completed", "the batch")
        made = client.batches.retrieve(made.id)
        for file_id in (made.output_file_id, made.error_file_id):
            assert file_id is not None
            answer = json.loads(client.files.content(file_id).text)
            response = answer["response"]
            headers = {"x-request-id": response["request_id"], "content-type": "application/json"}
            body = json.dumps(response["body"]).encode()
            calls.note(answer["custom_id"], Response(response["status_code"], headers, body))


def kill_engine(calls: Calls) -> None:
    case = "an engine killed in a stream"
    with calls.connect() as connection:
        body = chat(stream=True, max_tokens=900, ignore_eos=True)
        connection.send(connection.request("POST", CHAT, body))
        connection.read_until(b'"content"')
        os.kill(calls.gateway.engine_pid(), signal.SIGKILL)
        calls.note(case, connection.read_response())


def drain(calls: Calls, model: str, gate: Any) -> None:
    """A stream that the end of the gateway waits for, and a call that comes too late."""
    running, late = calls.begin_stream(LAST[0], model=model), calls.connect()
    with running, late:
        late.ask("GET", "/health")
        calls.gateway.signal(signal.SIGINT)
        wait_until(lambda: "waiting up to" in calls.gateway.stderr(), "it drains")
        calls.note(LAST[1], late.ask("POST", CHAT, chat()))
        gate.open()
        calls.note(LAST[0], running.read_response())


@pytest.mark.parametrize("case", [*UPSTREAM, *OWN, *OTHERS])
def test_log_and_trace_say_what_the_client_was_told(calls: Calls, case: str) -> None:
    told, line, span = calls.told[case], calls.lines[case], calls.spans[case]
    message = told.message and told.message.replace(SECRET, "sk-…")
    assert (line.get("error_code"), line.get("error_message")) == (told.code, message)
    assert (span.attributes.get("error.type"), span.error) == (told.code, message or "")
    assert told.status == line["status"] == span.attributes["http.response.status_code"]
    is_ours = told.status >= 500 or (told.code is not None and told.status == 200)
    told_as = ("warning", "call failed") if is_ours else ("info", "call")
    assert (line["level"], line["event"]) == told_as
    if told.tokens is not None:
        assert (line["prompt_tokens"], line["output_tokens"]) == told.tokens
        usage = [span.attributes[f"gen_ai.usage.{kind}_tokens"] for kind in ("input", "output")]
        assert tuple(usage) == told.tokens


def test_the_cases_failed_as_they_should(calls: Calls) -> None:
    codes = {case: told.code for case, told in calls.told.items()}
    good = {"answered", "served", "served as a stream", "held 1", "held 2", "a client that left",
            "a line of a batch", "an engine killed in a stream", LAST[0]}  # fmt: skip
    assert {case for case, code in codes.items() if code is None} == good
    assert codes["a full gateway"] == "engine_overloaded"
    assert codes["an error in a stream"] == "wrong_key"
    assert codes["refused with 401"] == "upstream_key_refused"
    assert codes["its reader"] == "dependency_failed"
    assert codes["while draining"] == "shutting_down"


def test_metrics_count_what_the_clients_were_told(calls: Calls) -> None:
    told = [each for case, each in calls.told.items() if case not in LAST]
    statuses = Counter(str(each.status) for each in told)
    assert calls.counted("parrot_calls_total", 1) == statuses
    assert calls.counted("parrot_tenant_calls_total", 0).total() == len(told)
    codes = Counter(each.code or "" for each in told)
    assert calls.counted("gen_ai_server_request_duration_seconds_count", 3) == codes
    succeeded = codes.pop("")
    assert calls.counted("parrot_call_errors_total", 1) == codes
    assert calls.counted("vllm:request_success_total", 2).total() == succeeded
    ran = [line for case, line in calls.lines.items() if "engine" in line and case not in LAST]
    for kind, field in (("prompt", "prompt"), ("generation", "output")):
        tokens = sum(line.get(f"{field}_tokens", 0) for line in ran)
        assert calls.counted(f"vllm:{kind}_tokens_total", 1).total() == tokens


def test_exemplars_name_exported_traces(calls: Calls) -> None:
    assert calls.exemplars
    assert calls.exemplars <= {span.trace for span in calls.spans.values()}
