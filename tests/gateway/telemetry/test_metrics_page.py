"""The page at `/metrics`, read as Prometheus reads it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import CHAT, COMPLETIONS, Http
from harness.gateway.serving import Service, serving
from parrot_engine.link.wire import Register
from parrot_engine.protocol import EngineStats
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.server.app import create_app
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.model import Settings, TelemetrySettings
from parrot_gateway.telemetry.metrics.definitions import DEFINITIONS
from parrot_gateway.telemetry.metrics.labels import BoundedValues, label_text

DOCUMENT = Path(__file__).parents[3] / "docs" / "observability.md"
#: Of the process, by prometheus-client.
FOREIGN = ("process_", "python_")


class Page:
    """One page, parsed; a line that cannot be parsed raises."""

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {
            family.name: family for family in text_string_to_metric_families(text)
        }

    def value(self, name: str, **labels: str) -> float:
        """The only sample of that name and those labels, among others."""
        (found,) = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return float(found)


async def page_of(http: Http) -> Page:
    answer = await http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Page(answer.text)


def own(families: Iterable[Metric]) -> list[Metric]:
    return [family for family in families if not family.name.startswith(FOREIGN)]


def add_engine(gateway: Gateway, engine: ScriptedRemoteEngine, name: str) -> RemoteEngine:
    return gateway.registry.add(
        Register(name, engine.info, engine.tokenizer.assets), engine.tokenizer
    )


def test_names_are_vllms_opentelemetrys_or_our_own() -> None:
    names = [definition.name for definition in DEFINITIONS]
    assert len(set(names)) == len(names)
    for definition in DEFINITIONS:
        assert re.fullmatch(r"(vllm:|gen_ai_|parrot_)[a-z0-9_]+", definition.name)
        assert definition.help.endswith(".")
        assert (definition.kind == "histogram") == bool(definition.buckets)
        assert list(definition.buckets) == sorted(set(definition.buckets))


def test_the_document_lists_every_metric_and_no_other() -> None:
    rows = re.findall(
        r"^\| `(\S+?)` \| (counter|gauge|histogram) \|(.*?)\| (.+) \|$",
        DOCUMENT.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    documented = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, labels, meaning in rows
    }
    defined = {
        d.name if d.kind == "histogram" else d.sample_names[0]: (d.kind, d.labels, d.help)
        for d in DEFINITIONS
    }
    assert documented == defined
    assert len(rows) == len(defined)


async def test_a_page_holds_what_is_defined(http: Http) -> None:
    assert (await http.call(COMPLETIONS, "hi")).status_code == 200
    gateway = http.service.gateway
    http.service.remote.note_stats(
        EngineStats(
            running=3, filled_tokens=100, cached_tokens=40, steps=5, busy_s=0.25, read_once_tokens=9
        )
    )
    page = await page_of(http)
    defined = {definition.name: definition for definition in DEFINITIONS}
    for family in own(page.families.values()):
        definition = defined[family.name]
        assert family.type == definition.kind
        for sample in family.samples:
            assert sample.name in definition.sample_names
            assert set(sample.labels) - {"le"} == set(definition.labels)
    engine = {"model_name": "m", "engine": "scripted"}
    assert page.value("vllm:num_requests_running", **engine) == 3
    assert page.value("vllm:prefix_cache_queries_total", **engine) == 100
    assert page.value("vllm:prefix_cache_hits_total", **engine) == 40
    assert page.value("parrot_engine_prompt_tokens_total", source="computed", **engine) == 60
    assert page.value("parrot_engine_busy_seconds_total", **engine) == 0.25
    assert page.value("parrot_engine_read_once_tokens_total", **engine) == 9
    assert page.value("parrot_engines", kind="scripted", state="ready") == 1
    assert page.value("parrot_requests_accepted_total") == gateway.gate.accepted
    assert page.value("parrot_scheduler_placements_total", reason="load") == 1
    assert page.value("process_resident_memory_bytes") > 0


async def test_what_deferral_saves_and_how_graphs_were(http: Http) -> None:
    first = {"session": "s", "output": "a", "defer": True}
    reads = {"session": "s", "inputs": {"a": "a"}, "output": "b", "defer": True}
    # The reader first: it waits for its input.
    assert (await http.call(COMPLETIONS, "after {{a}}", parrot=reads)).status_code == 200
    assert (await http.call(COMPLETIONS, "one", parrot=first)).status_code == 200
    session = http.service.gateway.semantic.sessions.find("default", "s")
    variable = session.find("b")
    assert variable is not None
    assert (await http.value(variable.id)).status_code == 200
    page = await page_of(http)
    assert page.value("parrot_deferred_round_trips_saved_total") == 1
    assert page.value("parrot_deferred_head_start_seconds_total") > 0
    assert page.value("parrot_graph_calls_total", outcome="done") == 2
    assert page.value("parrot_graph_calls_unfinished", state="waiting") == 0
    assert page.value("parrot_session_graph_depth_count") == 0
    http.service.gateway.semantic.close_session(session)
    page = await page_of(http)
    assert page.value("parrot_session_graph_depth_sum") == 2
    assert page.value("parrot_session_graph_depth_bucket", le="1") == 0
    assert page.value("parrot_session_graph_depth_bucket", le="2") == 1
    assert page.value("parrot_session_graph_width_sum") == 1
    assert page.value("parrot_session_graph_calls_sum") == 2
    assert page.value("parrot_sessions_ended_total", reason="closed") == 1


async def test_prompts_that_calls_have_in_common() -> None:
    engine = ScriptedRemoteEngine(automatic=False)
    engine.info = replace(engine.info, block_size=4, num_blocks=1000)
    async with serving(engine) as service, Http(service) as http:
        ends = ("one", "two", "three")
        calls = [asyncio.ensure_future(http.call(COMPLETIONS, "x" * 42 + end)) for end in ends]
        await engine.wait_for(lambda: len(engine.contexts) == len(ends))
        page = await page_of(http)
        engine.automatic = True
        engine.step()
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        after = await page_of(http)
    # Ten blocks that two of the three need not hold again.
    assert page.value("parrot_engine_shared_prompt_tokens") == 40 * 2
    assert after.value("parrot_engine_shared_prompt_tokens") == 0
    assert page.value("parrot_engine_kv_blocks", state="used") == 1000


async def test_blocks_are_used_cached_or_empty() -> None:
    engine = ScriptedRemoteEngine()
    engine.info = replace(engine.info, block_size=4, num_blocks=1000, host_blocks=50)
    async with serving(engine) as service, Http(service) as http:
        service.remote.note_stats(
            EngineStats(
                free_blocks=600,
                cached_blocks=150,
                host_blocks=20,
                blocks_to_host=7,
                blocks_from_host=3,
            )
        )
        page = await page_of(http)
    states = {"used": 400, "cached": 150, "empty": 450, "host": 20}
    for state, count in states.items():
        assert page.value("parrot_engine_kv_blocks", state=state) == count
    assert page.value("vllm:kv_cache_usage_perc") == 0.4
    assert page.value("parrot_engine_host_blocks_moved_total", direction="out") == 7
    assert page.value("parrot_engine_host_blocks_moved_total", direction="in") == 3


async def test_engines_beyond_the_limit_are_summed_up(
    engine: ScriptedRemoteEngine, service: Service
) -> None:
    gateway, added = service.gateway, 204
    engine.info = replace(engine.info, block_size=4, num_blocks=10)
    for number in range(added):
        add_engine(gateway, engine, f"e{number}").note_stats(EngineStats(steps=1))
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    first, second = await asyncio.gather(gateway.metrics.page(), gateway.metrics.page())
    counting.cancel()
    assert first is second
    # The event loop went on meanwhile.
    assert turns > 10
    page = Page(first.decode())
    steps = page.families["parrot_engine_steps"].samples
    assert len(steps) == 201
    assert page.value("parrot_engine_steps_total", engine="other") == 5
    # An age and a share mean nothing as sums.
    # The engine that was there first has no blocks.
    counts = {"parrot_engine_heartbeat_age_seconds": 200, "vllm:kv_cache_usage_perc": 199}
    for name, count in counts.items():
        engines = [sample.labels["engine"] for sample in page.families[name].samples]
        assert len(engines) == count
        assert "other" not in engines


async def test_labels_are_escaped_and_cut(http: Http, engine: ScriptedRemoteEngine) -> None:
    name = 'a "quoted"\\ name\n' + "x" * 1000
    add_engine(http.service.gateway, engine, name)
    page = await page_of(http)
    found = {sample.labels["engine"] for sample in page.families["parrot_engine_steps"].samples}
    assert name[:200] in found


async def test_openmetrics_where_a_scraper_asks_for_it(http: Http) -> None:
    await http.call(CHAT, "hello")
    text = (await http.get("/metrics")).text
    asked = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3"
    answer = await http.get("/metrics", headers={"accept": asked})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0;")
    found = list(openmetrics.text_string_to_metric_families(answer.text))
    assert {sample.name for family in found for sample in family.samples} == {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }


def test_only_real_values_take_a_place() -> None:
    values = BoundedValues(2)
    assert values.of("made-up", places=0) == "other"
    assert [values.of(each) for each in ("a", "b", "c", "a")] == ["a", "b", "other", "a"]
    assert values.of("b", places=0) == "b"
    assert label_text((), ()) == ""


@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [
        ({}, None, 401),
        ({}, "wrong", 401),
        ({}, "secret", 200),
        ({}, "admin", 200),
        ({"metrics_access": "open"}, None, 200),
        ({"metrics": False}, "secret", 404),
    ],
)
def test_who_may_read_metrics(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], key: str | None, status: int
) -> None:
    monkeypatch.setenv("PARROT_API_KEY", "secret")
    monkeypatch.setenv("PARROT_ADMIN_KEY", "admin")
    gateway = Gateway(Settings(telemetry=TelemetrySettings.model_validate(settings)))
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = TestClient(create_app(gateway)).get("/metrics", headers=headers)
    assert answer.status_code == status
    if status == 200:
        assert Page(answer.text).value("parrot_gateway_ready") == 0
    else:
        assert answer.json()["error"]["message"]


def test_a_port_of_its_own_answers_metrics_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARROT_API_KEY", "secret")
    app = create_app(Gateway(Settings()), metrics_port=9100)
    own_port = TestClient(app, base_url="http://127.0.0.1:9100")
    assert Page(own_port.get("/metrics").text).value("parrot_gateway_ready") == 0
    for method, path in (("GET", "/health"), ("POST", CHAT), ("POST", "/metrics")):
        answer = own_port.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_route")
    other = TestClient(app, base_url="http://127.0.0.1:8000")
    assert other.get("/metrics").status_code == 401
    assert other.get("/health/liveness").status_code == 200
