"""Engines and upstreams as the live page shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from parrot_engine.link.wire import Register
from parrot_engine.protocol import EngineStats

from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.model import Settings, UpstreamSettings
from parrot_gateway.ui import engine_table
from parrot_gateway.ui.engine_table import EngineTable


def table_of(gateway: Gateway) -> EngineTable:
    return EngineTable(gateway.registry, gateway.supervisor, gateway.upstreams, gateway.scheduling)


async def test_rates_are_those_between_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(engine_table.time, "monotonic", lambda: now)
    gateway, scripted = Gateway(Settings()), ScriptedRemoteEngine()
    info = replace(scripted.info, num_blocks=100, block_size=16)
    engine = gateway.registry.add(Register("one", info, scripted.tokenizer.assets))
    table = table_of(gateway)
    engine.note_stats(
        EngineStats(
            free_blocks=60, cached_blocks=20, steps=10, busy_s=0.1, filled_tokens=50,
            cached_tokens=50, generated_tokens=1000, waiting=3,
        )
    )  # fmt: skip
    await table.refresh()
    (view,) = table.engines
    assert (view["kv_used"], view["kv_cached"], view["kv_total"]) == (40, 20, 100)
    assert (view["prefix_hit_rate"], view["step_ms"], view["waiting"]) == (0.5, 10.0, 3)
    assert view["tokens_per_s"] is None
    now = 2.0
    engine.note_stats(
        replace(
            engine.stats, steps=110, busy_s=0.6, filled_tokens=75, cached_tokens=125,
            generated_tokens=1500, read_once_tokens=4250,
        )
    )  # fmt: skip
    await table.refresh()
    (view,) = table.engines
    assert view["read_once_per_step"] == 42.5
    assert (view["prefix_hit_rate"], view["step_ms"], view["tokens_per_s"]) == (0.75, 5.0, 250.0)
    gateway.registry.drain(engine.id)
    await table.refresh()
    assert table.engines[0]["state"] == "draining"
    gateway.registry.remove(engine.id, "gone")
    await table.refresh()
    assert table.engines == []
    # What has never been seen is forgotten too.
    assert table._rates == {}


async def test_upstreams_have_the_same_fields_unknown_ones_null() -> None:
    upstreams = [
        UpstreamSettings(name="cloud", url="http://127.0.0.1:9/v1"),
        UpstreamSettings(name="farm", urls=["http://127.0.0.1:9/v1", "http://127.0.0.1:8/v1"]),
    ]
    gateway = Gateway(Settings(upstreams=upstreams))
    table = table_of(gateway)
    await table.refresh()
    views = table.engines
    assert [view["upstream"] for view in views] == ["cloud", "farm", "farm"]
    assert len({view["id"] for view in views}) == 3
    for view in views:
        assert (view["kind"], view["kv_total"], view["tokens_per_s"]) == ("upstream", None, None)
