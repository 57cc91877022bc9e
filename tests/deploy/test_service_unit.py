"""The unit of systemd: valid, hardened, and with time to drain."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parrot_gateway.settings.model import ServerSettings

UNIT = Path(__file__).parent.parent.parent / "deploy" / "systemd" / "parrot-gateway.service"


def values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(encoding="utf-8"), flags=re.MULTILINE)


def analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze here")
    return program


def test_a_drain_has_time_and_a_reload_is_a_signal() -> None:
    (stop,) = values("TimeoutStopSec")
    assert float(stop) >= ServerSettings().drain_timeout_s + 20
    assert values("KillSignal") == ["SIGTERM"]
    assert values("KillMode") == ["mixed"]
    (reload,) = values("ExecReload")
    assert "-HUP" in reload
    assert not [each for each in values("Environment") if "KEY" in each]


def test_the_start_and_life_are_told() -> None:
    # `parrot_gateway.server.service_manager` does.
    assert (values("Type"), values("NotifyAccess")) == (["notify"], ["main"])
    assert float(*values("WatchdogSec")) > 0
    assert any("AF_UNIX" in each for each in values("RestrictAddressFamilies"))


def test_the_unit_is_valid(tmp_path: Path) -> None:
    # It names a program that is not there: one that is stands in for it.
    unit = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/parrot/bin/parrot-gateway", sys.executable))
    found = subprocess.run([analyze(), "verify", str(unit)], capture_output=True, text=True)
    complaints = [line for line in found.stderr.splitlines() if UNIT.name in line]
    assert complaints == []


def test_the_unit_is_hardened() -> None:
    command = [analyze(), "security", "--offline=true", "--no-pager", str(UNIT)]
    found = subprocess.run(command, capture_output=True, text=True)
    if "unrecognized option" in found.stderr:
        pytest.skip("this systemd-analyze judges no files")
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", found.stdout)
    assert level is not None, found.stdout + found.stderr
    assert float(level[1]) < 2.0
