"""The Grafana dashboard and Prometheus's rules ask for metrics and labels that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from parrot_gateway.telemetry.metrics.definitions import DEFINITIONS

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "parrot-gateway.json"
RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
#: Alerts on made-up series.
ALERT_TESTS = Path(__file__).parent / "alerts.test.yml"
#: Of Prometheus itself and of prometheus-client, with the labels that every scrape adds.
SCRAPED = {"instance", "job"}
LABELS = {
    name: {*definition.labels, *SCRAPED, *(["le"] if name.endswith("_bucket") else [])}
    for definition in DEFINITIONS
    for name in definition.sample_names
} | dict.fromkeys(
    ("up", "process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds",
     "process_max_fds"),
    SCRAPED,
)  # fmt: skip
WORDS = {
    *("sum", "max", "rate", "increase", "histogram_quantile", "clamp_min", "topk", "vector"),
    *("by", "and", "or"),
}
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
_TOKEN = re.compile(r"\"[^\"]*\"|\$\w+|\[[^\]]*\]|\d[\w.]*(?:(?<=e)-\d+)?|[a-zA-Z_:][\w:]*|.")


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return found


def queries() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel.get("targets", ()))


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def faults(expression: str) -> list[str]:
    """Names in a query that mean nothing, as far as that shows without Prometheus."""
    found = []
    used = {name for name in LABELS if re.search(rf"(?<![\w:]){name}(?![\w:])", expression)}
    if not used:
        found.append("no metric")
    for metric, selectors in _SELECTOR.findall(expression):
        known = LABELS.get(metric, set())
        found += [f"{metric}: {each}" for each in re.findall(r"(\w+) ?[=!]", selectors)
                  if each not in known]  # fmt: skip
    for labels in re.findall(r"\bby \(([^)]*)\)", expression):
        shared = set.intersection(*(LABELS[name] for name in used)) if used else set()
        found += [f"by {each}" for each in re.findall(r"\w+", labels) if each not in shared]
    plain = re.sub(r"\bby \([^)]*\)", "", _SELECTOR.sub(r"\1", expression))
    for token in _TOKEN.findall(plain):
        if re.match(r"[a-zA-Z_:]", token) and token not in WORDS and token not in LABELS:
            found.append(token)
    return found


def test_the_dashboard_and_the_rules_ask_for_what_there_is() -> None:
    asked = [*queries(), *(rule["expr"] for rule in alerts())]
    assert len(asked) > 60
    assert {expression: faults(expression) for expression in asked if faults(expression)} == {}


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(parrot_call_total[5m])",
        "sum by (engine) (vllm:e2e_request_latency_seconds_count)",
        'parrot_sessions{model_name="m"}',
        "vllm:e2e_request_latency_seconds",
        "summ(parrot_sessions)",
    ],
)
def test_a_wrong_query_would_be_found(wrong: str) -> None:
    assert faults(wrong)


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    """Check ids, places, types, units and the data source of its variable, as its schema asks."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert dashboard["uid"]
    assert dashboard["schemaVersion"] >= 36
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", "".join(queries()))) - {"__rate_interval"} <= names
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("stat", "timeseries")
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for thing in (panel, *panel["targets"]):
            assert thing["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    for rule in alerts():
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        shown = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        used = {name for name in LABELS if re.search(rf"(?<![\w:]){name}\b", rule["expr"])}
        assert all(shown <= LABELS[name] for name in used), rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_every_query_and_rule(tmp_path: Path) -> None:
    check = [sys.executable, str(ROOT / "deploy" / "grafana" / "check_dashboard.py"), "--as-rules"]
    rules = tmp_path / "panels.yml"
    rules.write_bytes(subprocess.run(check, capture_output=True, check=True, timeout=60).stdout)
    promtool = ["promtool", "check", "rules", "--lint-fatal"]
    for file, count in ((RULES, len(alerts())), (rules, len(list(queries())))):
        ran = subprocess.run([*promtool, str(file)], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert f"{count} rules found" in ran.stdout
    config = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    for command in (["check", "config", str(config)], ["test", "rules", str(ALERT_TESTS)]):
        ran = subprocess.run(["promtool", *command], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr
