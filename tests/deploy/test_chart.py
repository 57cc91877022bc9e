"""The Helm chart: values and their schema, and what Helm makes of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from parrot_gateway import __version__
from parrot_gateway.settings.sources import load_settings

CHART = Path(__file__).parent.parent.parent / "deploy" / "helm" / "parrot-gateway"
#: Everything that is off by default, but for a volume, which replicas cannot share.
ALL = {
    "autoscaling": {"enabled": True},
    "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "networkPolicy": {
        "enabled": True,
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
        "metrics": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
    },
    "serviceAccountName": "gateway",
    "extraVolumes": [{"name": "keys", "secret": {"secretName": "more"}}],
    "extraVolumeMounts": [{"name": "keys", "mountPath": "/run/secrets", "readOnly": True}],
    "imagePullSecrets": [{"name": "registry"}],
    "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "inference"},
    "service": {"annotations": {"a": "b"}, "sessionAffinity": "ClientIP"},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
}


VOLUME = {"persistence": {"enabled": True, "storageClass": "fast"}}


def values() -> Any:
    return yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def schema() -> Any:
    return json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


def rendered(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Render what Helm would install, without a cluster."""
    helm = pytest.importorskip(
        "helm_python.chart", reason="no Helm here (pip install helm-python-sdk)"
    )
    texts = helm.Chart.load(CHART).render(given, name="demo", namespace="apps")
    return [
        part
        for path, text in texts.items()
        if not path.endswith(".txt")
        for part in yaml.safe_load_all(text)
        if part
    ]


def kind(parts: list[dict[str, Any]], name: str) -> Any:
    (only,) = [part for part in parts if part["kind"] == name]
    return only


def test_values_and_schema_name_the_same() -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    jsonschema.validate(values(), schema())
    jsonschema.validate(ALL | {key: values()[key] for key in schema()["required"]}, schema())

    def compare(given: Any, described: dict[str, Any], path: str) -> None:
        if described.get("additionalProperties") is not False:
            return
        optional = {"global", "nameOverride", "fullnameOverride"} if not path else set()
        assert set(given) == set(described["properties"]) - optional, path
        for name, value in given.items():
            compare(value, described["properties"][name], f"{path}.{name}")

    compare(values(), schema(), "")


def test_templates_use_values_that_exist() -> None:
    used = set()
    for file in sorted((CHART / "templates").iterdir()):
        used |= set(re.findall(r"\.Values\.([A-Za-z.]+)", file.read_text(encoding="utf-8")))
    given = values()
    for name in sorted(used - {"nameOverride", "fullnameOverride"}):
        value = given
        for part in name.split("."):
            assert part in value, name
            value = value[part]
    assert {name.partition(".")[0] for name in used} >= set(given)


def test_the_version_is_the_gateways() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == __version__


@pytest.mark.parametrize(
    "given",
    [{}, ALL, VOLUME, {"networkPolicy": {"enabled": True}}, {"replicaCount": 3, "resources": {}}],
    ids=["defaults", "all", "volume", "policy", "replicas"],
)
def test_what_is_installed_is_valid(given: dict[str, Any]) -> None:
    parts = rendered(given)
    assert {part["kind"] for part in parts} >= {"Deployment", "Service", "ConfigMap"}
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="no schemas of Kubernetes (pip install kubernetes-validate)"
    )
    for part in parts:
        if part["kind"] != "ServiceMonitor":
            kubernetes.validate(part, "1.30", strict=True)


def test_helm_lints_the_chart() -> None:
    helm = pytest.importorskip(
        "helm_python.chart", reason="no Helm here (pip install helm-python-sdk)"
    )
    report = helm.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize(
    "given",
    [{"replicaCount": "two"}, {"servcie": {}}, {"existingSecret": ""}, {"image": {"tags": "x"}}],
)
def test_wrong_values_are_refused(given: dict[str, Any]) -> None:
    helm = pytest.importorskip(
        "helm_python.chart", reason="no Helm here (pip install helm-python-sdk)"
    )
    with pytest.raises(Exception, match=next(iter(given))):
        helm.Chart.load(CHART).validate_schema(given)


def test_the_gateway_takes_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = rendered({"metrics": {"port": 9999}, "drain": {"timeoutSeconds": 77}})
    (container,) = kind(parts, "Deployment")["spec"]["template"]["spec"]["containers"]
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each["value"])
    monkeypatch.setenv("PARROT_API_KEY", "key")
    file = tmp_path / "parrot.yaml"
    file.write_text(kind(parts, "ConfigMap")["data"]["parrot.yaml"])
    settings = load_settings({}, file)
    assert settings.models
    assert settings.server.drain_timeout_s == 77
    assert settings.telemetry.metrics_port == 9999
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": settings.server.port, "metrics": 9999}
    assert container["args"][-1].endswith(file.name)


def test_a_pod_is_confined_probed_and_drained() -> None:
    pod = kind(rendered({}), "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/liveness"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/readiness"
    drain = values()["drain"]
    assert container["lifecycle"]["preStop"]["exec"]["command"][-1] == str(drain["preStopSeconds"])
    # Engines have 10 s to end, clients whose calls are cut off 1 s, connections 5 s.
    assert pod["terminationGracePeriodSeconds"] >= sum(drain.values()) + 20
    assert container["envFrom"] == [{"secretRef": {"name": values()["existingSecret"]}}]


def test_scaling_follows_a_metric_of_the_gateway() -> None:
    parts = rendered(ALL)
    (metric,) = kind(parts, "HorizontalPodAutoscaler")["spec"]["metrics"]
    documented = (CHART.parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
    assert f"`{metric['pods']['metric']['name']}`" in documented
    deployment = kind(parts, "Deployment")
    assert "replicas" not in deployment["spec"]
    monitor = kind(parts, "ServiceMonitor")["spec"]
    labels = monitor["selector"]["matchLabels"]
    (service,) = [
        part for part in parts
        if part["kind"] == "Service" and labels.items() <= part["metadata"]["labels"].items()
    ]  # fmt: skip
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_a_volume_belongs_to_one_gateway_at_a_time() -> None:
    assert kind(rendered(VOLUME), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert kind(rendered({}), "Deployment")["spec"]["strategy"]["type"] == "RollingUpdate"
    given = VOLUME | {"strategy": {"type": "RollingUpdate"}}
    assert kind(rendered(given), "Deployment")["spec"]["strategy"] == {"type": "RollingUpdate"}
    for more in ({"replicaCount": 2}, {"autoscaling": {"enabled": True}}):
        with pytest.raises(Exception, match="a volume belongs to one gateway"):
            rendered(VOLUME | more)


def test_metrics_without_a_key_are_read_by_those_who_are_named() -> None:
    def ports(given: dict[str, Any]) -> dict[str, Any]:
        policy = kind(rendered({"networkPolicy": {"enabled": True, **given}}), "NetworkPolicy")
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        return {rule["ports"][0]["port"]: rule["from"] for rule in policy["spec"]["ingress"]}

    sources = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    assert ports({}) == {"http": []}
    assert ports({"clients": sources, "metrics": sources}) == {"http": sources, "metrics": sources}
    assert "NetworkPolicy" not in {part["kind"] for part in rendered({})}
