"""Figures of calls on the page at `/metrics`."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import CHAT, COMPLETIONS, Http, body_of
from harness.gateway.serving import serving
from harness.scripted_upstream import (
    ScriptedUpstream,
    chat_document,
    chat_events,
    document,
    event_stream,
)
from parrot_engine.protocol import Failed
from prometheus_client.parser import text_string_to_metric_families

from parrot_gateway.settings.model import UpstreamSettings
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.metrics.call_metrics import CallMetrics
from parrot_gateway.telemetry.metrics.definitions import (
    CALL_ERRORS,
    CALLS,
    CALLS_LEFT,
    DECODE,
    DEFINITIONS,
    E2E,
    GEN_AI_DURATION,
    INFERENCE,
    PREFILL,
    PROMPT_LENGTH,
    PROMPT_TOKENS,
    QUEUE,
    STAGES,
    SUCCESS,
    TENANT_CALLS,
    TENANT_TOKENS,
    TOKEN_GAPS,
    TOKEN_MEAN,
    TTFT,
    Definition,
)
from parrot_gateway.telemetry.trace_context import CallTrace


async def values_of(http: Http) -> dict[tuple[str, ...], float]:
    """By name and values of its labels in the order of the page, every sample that is not 0."""
    text = (await http.get("/metrics")).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.value and "le" not in sample.labels
    }


async def test_a_call_is_counted_once_in_each_metric(
    engine: ScriptedRemoteEngine, http: Http
) -> None:
    engine.cached_tokens = 2
    chat = (await http.call(CHAT, "hello there")).json()["usage"]
    stream = await http.call(COMPLETIONS, "hello there", stream=True, max_tokens=2)
    assert stream.status_code == 200
    values = await values_of(http)
    prompt = values["vllm:prompt_tokens_total", "m", "scripted"]
    assert prompt > chat["prompt_tokens"]
    assert values["vllm:request_prompt_tokens_sum", "m"] == prompt
    output = chat["completion_tokens"] + 2
    assert values["vllm:generation_tokens_total", "m", "scripted"] == output
    assert values["vllm:request_generation_tokens_sum", "m"] == output
    assert values["parrot_cached_prompt_tokens_total", "m", "scripted"] == 4
    assert values["vllm:request_success_total", "m", "scripted", "stop"] == 1
    assert values["vllm:request_success_total", "m", "scripted", "length"] == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert values[f"vllm:{name}_seconds_count", "m"] == 2
    # A gap fewer than tokens, of each call.
    assert values["vllm:inter_token_latency_seconds_count", "m"] == output - 2
    assert values["vllm:request_time_per_output_token_seconds_count", "m"] == 2
    for stage in ("prepare", "queue", "first_token", "generate"):
        assert values["parrot_call_stage_seconds_count", stage] == 2
    for operation in ("chat", "text_completion"):
        of = (operation, "parrot_gateway", "m")
        assert values["gen_ai_server_time_to_first_token_seconds_count", *of] == 1
        assert values["gen_ai_server_request_duration_seconds_count", *of, ""] == 1
        assert values["gen_ai_client_token_usage_count", *of, "input"] == 1
    assert (
        values["gen_ai_client_token_usage_sum", "chat", "parrot_gateway", "m", "output"]
        == output - 2
    )
    assert values["parrot_calls_total", CHAT, "200"] == 1
    assert values["parrot_calls_total", COMPLETIONS, "200"] == 1
    assert values["parrot_tenant_calls_total", "default"] == 2
    assert values["parrot_tenant_tokens_total", "default", "prompt"] == prompt


async def test_times_add_up(http: Http) -> None:
    await http.call(CHAT, "hello")
    values = await values_of(http)
    stages = ("prepare", "queue", "first_token", "generate")
    whole = sum(values["parrot_call_stage_seconds_sum", stage] for stage in stages)
    assert whole == pytest.approx(values["vllm:e2e_request_latency_seconds_sum", "m"])
    decode = values["vllm:inter_token_latency_seconds_sum", "m"]
    assert decode == pytest.approx(values["parrot_call_stage_seconds_sum", "generate"])
    parts = {
        part: values[f"vllm:request_{part}_time_seconds_sum", "m"]
        for part in ("prefill", "decode", "inference")
    }
    assert parts["decode"] == pytest.approx(decode)
    assert parts["prefill"] == pytest.approx(values["parrot_call_stage_seconds_sum", "first_token"])
    assert parts["inference"] == pytest.approx(parts["prefill"] + parts["decode"])


async def test_errors_are_counted_by_code_and_make_no_labels(
    engine: ScriptedRemoteEngine, http: Http
) -> None:
    wrong = await http.call(CHAT, "hello", temperature=99)
    engine.script = lambda prompt, sampling: [Failed(0, "numerical_error", "not a number")]
    failed = await http.call(CHAT, "hello")
    assert (wrong.status_code, failed.status_code) == (400, 500)
    values = await values_of(http)
    assert values["parrot_calls_total", CHAT, "400"] == 1
    errors = {key[1:] for key in values if key[0] == "parrot_call_errors_total"}
    assert errors == {("m", each.json()["error"]["code"]) for each in (wrong, failed)}
    assert values["parrot_tenant_errors_total", "default"] == 2
    assert not [key for key in values if key[0].startswith("vllm:request_success")]
    assert not [key for key in values if key[0].startswith("vllm:e2e")]


async def test_first_tokens_of_upstreams_are_those_of_streams(upstream: ScriptedUpstream) -> None:
    events = event_stream(*chat_events(["Hello"]))
    model = upstream.script(document(chat_document()), events)
    settings = UpstreamSettings(name="up", url=upstream.base_url, models=[model])
    engine = ScriptedRemoteEngine()
    async with serving(engine, upstreams=[settings]) as service, Http(service) as http:
        await service.gateway.upstreams["up"].start()
        try:
            for stream in (False, True):
                body = {**body_of(CHAT, "hello"), "model": model, "stream": stream}
                assert (await http.post(CHAT, json=body)).status_code == 200
            values = await values_of(http)
        finally:
            await service.gateway.upstreams["up"].close()
    assert values["vllm:e2e_request_latency_seconds_count", model] == 2
    assert values["vllm:time_to_first_token_seconds_count", model] == 1
    assert values["parrot_upstream_ready", "up"] == 1
    assert values["parrot_calls_total", CHAT, "200"] == 2


def record(**fields: Any) -> CallRecord:
    """A record that has ended."""
    now = time.perf_counter()
    given = {"path": CHAT, "status": 200, "ended": now, **fields}
    return CallRecord("req_1", "call_1", now - 1.0, **given)


def test_labels_are_bounded() -> None:
    metrics = CallMetrics(lambda: [f"e{number}" for number in range(300)])
    for number in range(300):
        served = record(tenant=f"t{number}", served_model=f"m{number}", engine=f"e{number}")
        metrics.count([served, record(status=404, served_model=f"made-up-{number}")])
    assert len(metrics.counters(TENANT_CALLS)) == 51
    # One of the 50 is that of the calls that failed.
    assert metrics.counters(TENANT_CALLS)['{tenant="other"}'] == 251
    # One of the 200 engines is none, that of the calls that failed.
    assert len(metrics.counters(SUCCESS)) == 200
    assert "made-up" not in "".join(metrics.counters(SUCCESS))
    assert sum(metrics.counters(CALLS).values()) == 600


def test_a_model_takes_its_label_with_the_first_success_or_when_it_is_served() -> None:
    metrics = CallMetrics(is_served=lambda name: name == "mine")
    for error in ("e", None, "e"):
        status = 502 if error else 200
        metrics.count([record(status=status, served_model="theirs", error_code=error)])
    metrics.count([record(status=502, served_model="mine", error_code="e")])
    assert metrics.counters(CALL_ERRORS) == {
        '{model_name="other",error="e"}': 1,
        '{model_name="theirs",error="e"}': 1,
        '{model_name="mine",error="e"}': 1,
    }


def test_exemplars_are_of_calls_that_have_a_span_and_of_its_trace() -> None:
    metrics, moved = CallMetrics(), CallTrace(1, 1)
    traces = [moved, CallTrace(2, 1, sampled=False), None]
    metrics.count([record(served_model="m", engine="e", trace=trace) for trace in traces])
    assert not any("#" in each for each in metrics.histogram(E2E, has_exemplars=True))
    # The call's session is known only now.
    moved.move(255)
    moved.has_span = True
    lines = list(metrics.histogram(E2E, has_exemplars=True))
    (line,) = (each for each in lines if "#" in each)
    assert f' 3 # {{trace_id="{255:032x}"}} ' in line
    assert not any("#" in each for each in metrics.histogram(E2E))


def test_names_that_an_upstream_takes_leave_room_for_served_models() -> None:
    metrics = CallMetrics(is_served=lambda name: name == "mine")
    names = [*(f"m{number}" for number in range(300)), "mine"]
    metrics.count([record(served_model=name, engine="e") for name in names])
    shown = "".join(metrics.counters(SUCCESS))
    assert ('"m99"' in shown, '"m100"' in shown, '"mine"' in shown) == (True, False, True)


def test_a_client_that_left_is_an_abort() -> None:
    metrics = CallMetrics()
    metrics.count([record(status=499, client_left=True, served_model="m", engine="e")])
    (labels,) = metrics.counters(SUCCESS)
    assert 'finished_reason="abort"' in labels
    assert metrics.counters(CALLS_LEFT) == {"": 1}
    assert metrics.counters(CALL_ERRORS) == {}


def test_bounds_are_written_as_whole_numbers() -> None:
    """Prometheus compares them as text: another spelling would be another series."""
    metrics = CallMetrics()
    metrics.count([record(served_model="m", engine="e", prompt_tokens=1000)])
    lines = list(metrics.histogram(PROMPT_LENGTH))
    buckets = {line.split('le="')[1] for line in lines if "_bucket" in line}
    assert {'500"} 0\n', '1000"} 1\n', '500000"} 1\n', '+Inf"} 1\n'} <= buckets


def sums(metrics: CallMetrics, definition: Definition) -> dict[str, float]:
    """The sums of a histogram, by labels."""
    name = f"{definition.name}_sum"
    lines = [line for line in metrics.histogram(definition) if line.startswith(name)]
    return {labels[len(name) :]: float(value) for labels, value in map(str.rsplit, lines)}


def test_the_time_of_a_call_excludes_the_wait_for_its_inputs() -> None:
    metrics = CallMetrics()
    call = CallRecord(
        *("req_1", "call_1", 10.0),
        path=CHAT, status=200, served_model="m", engine="e", streamed=True, ready=14.0,
        submitted=14.5, queued_s=1.5, placed=16.0, first_token=16.25, ended=18.25, output_tokens=5,
    )  # fmt: skip
    metrics.count([call])
    model = '{model_name="m"}'
    assert sums(metrics, E2E) == {model: 4.25}
    assert sums(metrics, TTFT) == {model: 2.25}
    assert sums(metrics, QUEUE) == {model: 1.5}
    assert sums(metrics, PREFILL) == {model: 0.25}
    assert sums(metrics, DECODE) == {model: 2.0}
    assert sums(metrics, INFERENCE) == {model: 2.25}
    assert sums(metrics, TOKEN_MEAN) == {model: 0.5}
    assert sums(metrics, TOKEN_GAPS) == {model: 2.0}
    assert [*sums(metrics, GEN_AI_DURATION).values()] == [4.25]
    assert sums(metrics, STAGES) == {
        '{stage="inputs"}': 4.0,
        '{stage="prepare"}': 0.5,
        '{stage="queue"}': 1.5,
        '{stage="first_token"}': 0.25,
        '{stage="generate"}': 2.0,
    }


def everything(metrics: CallMetrics) -> dict[str, float]:
    """Every count that is not 0, and the count of every histogram, with its labels."""
    found = {}
    for definition in DEFINITIONS:
        if definition.kind == "histogram":
            for line in metrics.histogram(definition):
                name, value = line.rsplit(maxsplit=1)
                if "_count" in name:
                    found[name] = float(value)
        else:
            for labels, number in metrics.counters(definition).items():
                found[definition.name + labels] = number
    return {name: value for name, value in found.items() if value}


OWN = {
    "path": COMPLETIONS, "served_model": "m", "engine": "e", "tenant": "t", "submitted": 11.0,
    "queued_s": 1.0, "placed": 12.0, "first_token": 13.0, "ended": 15.0, "status": 200,
    "prompt_tokens": 7, "cached_tokens": 5, "output_tokens": 3, "finish_reason": "stop",
}  # fmt: skip
_MODEL = '{model_name="m"}'
_GEN_AI = (
    '{gen_ai_operation_name="text_completion",gen_ai_provider_name="parrot_gateway",'
    'gen_ai_request_model="m"'
)
LENGTHS = {
    f"vllm:request_prompt_tokens_count{_MODEL}": 1,
    f"vllm:request_generation_tokens_count{_MODEL}": 1,
    f'gen_ai_client_token_usage_count{_GEN_AI},gen_ai_token_type="input"}}': 1,
    f'gen_ai_client_token_usage_count{_GEN_AI},gen_ai_token_type="output"}}': 1,
}
FIRST = {
    f"vllm:time_to_first_token_seconds_count{_MODEL}": 1,
    f"vllm:request_decode_time_seconds_count{_MODEL}": 1,
    f"gen_ai_server_time_to_first_token_seconds_count{_GEN_AI}}}": 1,
}
PLACED = {
    f"vllm:request_prefill_time_seconds_count{_MODEL}": 1,
    f"vllm:request_inference_time_seconds_count{_MODEL}": 1,
}
GAPS = {
    f"vllm:inter_token_latency_seconds_count{_MODEL}": 2,
    f"vllm:time_per_output_token_seconds_count{_MODEL}": 2,
    f"vllm:request_time_per_output_token_seconds_count{_MODEL}": 1,
    f"gen_ai_server_time_per_output_token_seconds_count{_GEN_AI}}}": 1,
}
QUEUED = {f"vllm:request_queue_time_seconds_count{_MODEL}": 1}
ERRED = {'parrot_tenant_errors{tenant="t"}': 1}


def of_call(error: str = "", code: int = 200) -> dict[str, float]:
    name = "gen_ai_server_request_duration_seconds_count"
    model = _GEN_AI.replace('"m"', '"other"') if error else _GEN_AI
    found: dict[str, float] = {
        f'{name}{model},error_type="{error}"}}': 1,
        f'parrot_calls{{path="/v1/completions",code="{code}"}}': 1,
        'parrot_tenant_calls{tenant="t"}': 1,
    }
    return (
        {**found, f'parrot_call_errors{{model_name="other",error="{error}"}}': 1, **ERRED}
        if error
        else found
    )


def ended(reason: str, engine: str = "e") -> dict[str, float]:
    labels = f'{{model_name="m",engine="{engine}",finished_reason="{reason}"}}'
    return {
        f"vllm:request_success{labels}": 1,
        f"vllm:e2e_request_latency_seconds_count{_MODEL}": 1,
    }


def tokens(
    prompt: int, cached: int, output: int, model: str = "m", engine: str = "e"
) -> dict[str, float]:
    labels = f'{{model_name="{model}",engine="{engine}"}}'
    found = {
        f"vllm:prompt_tokens{labels}": prompt,
        f"parrot_cached_prompt_tokens{labels}": cached,
        f"vllm:generation_tokens{labels}": output,
        'parrot_tenant_tokens{tenant="t",type="prompt"}': prompt,
        'parrot_tenant_tokens{tenant="t",type="cached"}': cached,
        'parrot_tenant_tokens{tenant="t",type="output"}': output,
    }
    return {name: value for name, value in found.items() if value}


def stages(*names: str) -> dict[str, float]:
    return {f'parrot_call_stage_seconds_count{{stage="{name}"}}': 1 for name in names}


WHOLE = {**LENGTHS, **FIRST, **PLACED, **GAPS, **QUEUED}
STEPS = stages("prepare", "queue", "first_token", "generate")
UP = {**tokens(7, 5, 3, engine="up"), **STEPS}


@pytest.mark.parametrize(
    ("changed", "counted"),
    [
        ({}, {**of_call(), **ended("stop"), **WHOLE, **tokens(7, 5, 3), **STEPS}),
        # Nothing lies between fewer than two tokens.
        ({"output_tokens": 1},
         {**of_call(), **ended("stop"), **LENGTHS, **FIRST, **PLACED, **QUEUED, **tokens(7, 5, 1),
          **STEPS}),
        # No usage was told.
        ({"prompt_tokens": None, "cached_tokens": None, "output_tokens": None},
         {**of_call(), **ended("stop"), **FIRST, **PLACED, **QUEUED, **STEPS}),
        # Nobody placed it; it never had a place in line; it had no first token.
        ({"placed": None, "queued_s": None, "ready": 10.5},
         {**of_call(), **ended("stop"), **LENGTHS, **FIRST, **GAPS, **tokens(7, 5, 3),
          **stages("inputs", "prepare")}),
        ({"submitted": None}, {**of_call(), **ended("stop"), **WHOLE, **tokens(7, 5, 3)}),
        ({"first_token": None},
         {**of_call(), **ended("stop"), **LENGTHS, **QUEUED, **tokens(7, 5, 3),
          **stages("prepare", "queue")}),
        # An upstream's first bytes are its first token where it streams.
        ({"engine": "up"}, {**of_call(), **ended("stop", "up"), **LENGTHS, **QUEUED, **UP}),
        ({"engine": "up", "streamed": True}, {**of_call(), **ended("stop", "up"), **WHOLE, **UP}),
        # What failed has no times among the others, but its tokens were computed.
        ({"status": 500, "error_code": "broke"},
         {**of_call("broke", 500), **tokens(7, 5, 3, "other"), **STEPS}),
        ({"error_code": "broke"}, {**of_call("broke"), **tokens(7, 5, 3, "other"), **STEPS}),
        ({"status": 400, "engine": None}, {**of_call("unknown", 400), **STEPS}),
        ({"client_left": True},
         {**of_call(), **ended("abort"), **WHOLE, **tokens(7, 5, 3), **STEPS,
          "parrot_calls_abandoned": 1}),
        ({"deferred": True},
         {**of_call(), **ended("stop"), **WHOLE, **tokens(7, 5, 3), **STEPS,
          "parrot_deferred_calls": 1}),
        *(({"finish_reason": said},
           {**of_call(), **ended(reason), **WHOLE, **tokens(7, 5, 3), **STEPS})
          for said, reason in (("tool_calls", "stop"), ("function_call", "stop"),
                               ("length", "length"), ("content_filter", "unknown"),
                               (None, "unknown"))),
    ],
)  # fmt: skip
def test_what_a_call_counts_for(changed: dict[str, Any], counted: dict[str, float]) -> None:
    metrics = CallMetrics(lambda: ["e"], lambda: ["up"])
    call = CallRecord("req_1", "call_1", 10.0, **{**OWN, **changed})
    metrics.count([call])
    assert everything(metrics) == counted
    # A second of the same kind is counted in the same place.
    metrics.count([call])
    assert everything(metrics) == {name: 2 * value for name, value in counted.items()}


def test_what_is_known_of_a_kind_of_calls_is_forgotten_with_its_labels() -> None:
    """A model that takes its label, and kinds of calls without end."""
    metrics = CallMetrics()
    failed = record(status=500, served_model="m", error_code="broke")
    metrics.count([failed, record(served_model="n"), failed])
    assert metrics.counters(CALL_ERRORS) == {'{model_name="other",error="broke"}': 2}
    metrics.count([record(served_model="m"), failed])
    errors = {'{model_name="other",error="broke"}': 2, '{model_name="m",error="broke"}': 1}
    assert metrics.counters(CALL_ERRORS) == errors
    metrics.count([record(status=200, tenant=f"t{number}") for number in range(5000)])
    assert len(metrics._remembered) <= 4096


def test_exemplars_name_the_time_of_a_call_in_each_of_its_histograms() -> None:
    trace = CallTrace(255, 1, has_span=True)
    fields = {**OWN, "ready": 10.5, "started_at": 1000.0, "trace": trace}
    for changed, is_first in (
        ({}, True),
        ({"engine": "up"}, False),
        ({"first_token": None}, False),
    ):
        metrics = CallMetrics(upstreams=lambda: ["up"])
        metrics.count([CallRecord("req_1", "call_1", 10.0, **{**fields, **changed})])
        for definition, value in ((GEN_AI_DURATION, 4.5), (E2E, 4.5), (TTFT, 2.5)):
            lines = [
                line for line in metrics.histogram(definition, has_exemplars=True) if "#" in line
            ]
            if definition is TTFT and not is_first:
                assert lines == []
            else:
                (line,) = lines
                assert f'le="{5 if value > 2.5 else 2.5:g}' in line
                assert line.endswith(f' 1 # {{trace_id="{255:032x}"}} {value} 1005.000\n')
    failed = CallMetrics()
    failed.count([CallRecord("req_1", "call_1", 10.0, **{**fields, "status": 500})])
    assert sum("#" in line for line in failed.histogram(GEN_AI_DURATION, has_exemplars=True)) == 1
    assert list(failed.histogram(E2E, has_exemplars=True)) == []


def test_series_of_dropped_engines_count_on() -> None:
    """An engine that comes back after its series made room for others has one again."""
    now = [f"e{number}" for number in range(200)]
    metrics = CallMetrics(lambda: now)
    calls = {name: record(served_model="m", engine=name, prompt_tokens=3) for name in now}

    def counted(name: str) -> float | None:
        labels = f'{{model_name="m",engine="{name}"}}'
        return metrics.counters(PROMPT_TOKENS).get(labels)

    for name in (*now, "e0", "e199"):
        metrics.count([calls[name]])
    assert (counted("e0"), counted("e1"), counted("e199")) == (6, 3, 6)
    now[:] = ["new", *now[100:]]
    metrics.count([record(served_model="m", engine="new", prompt_tokens=3)])
    assert (counted("new"), counted("e0"), counted("e199")) == (3, None, 6)
    now.append("e0")
    metrics.count([calls["e0"], calls["e0"], calls["e199"]])
    assert (counted("e0"), counted("e199")) == (6, 9)
    # What has no engine among its labels goes on as well.
    assert sum(metrics.counters(TENANT_CALLS).values()) == 206
    assert metrics.counters(TENANT_TOKENS)['{tenant="default",type="prompt"}'] == 3 * 206


def test_engines_that_are_gone_make_room() -> None:
    now: list[str] = []
    metrics = CallMetrics(lambda: now)
    for generation in range(3):
        now[:] = [f"e{generation}-{number}" for number in range(150)]
        # The last one's engine has just left.
        names = [*now, "gone"]
        metrics.count([record(served_model="m", engine=name, prompt_tokens=1) for name in names])
    labels = metrics.counters(PROMPT_TOKENS)
    assert all(any(f'"{name}"' in each for each in labels) for name in now)
    assert len(labels) <= 202
    assert sum(metrics.counters(TENANT_CALLS).values()) == 3 * 151
