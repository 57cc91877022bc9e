"""Examines what this machine can do for the gateway, what is missing, and how to install it.

It changes nothing, loads no model and opens no connection.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal, TypeAlias

import typer

from parrot_gateway.extras import EXTRAS, advice_on

State: TypeAlias = Literal["ok", "missing", "broken", "note"]

#: Packages without which the gateway does not start or is slow.
GATEWAY_PACKAGES = ("uvicorn", "httptools", "uvloop", "fastapi", "aiohttp", "msgspec",
                    "tokenizers", "websockets", "numpy")  # fmt: skip
_COLOURS = {"ok": "green", "missing": "yellow", "broken": "red", "note": "cyan"}


@dataclass(frozen=True, slots=True)
class Finding:
    topic: str
    state: State
    what: str
    #: The remedy, if there is one.
    advice: str = ""


def examine() -> list[Finding]:
    """Examine everything, in the order of display."""
    return [
        _python(),
        _machine(),
        *_packages(GATEWAY_PACKAGES, "broken", "pip install parrot-gateway"),
        *_packages(EXTRAS["engine"], "missing", advice_on("engine")),
        _accelerator(),
        _descriptors(),
        _port(8000),
        _disk(),
    ]


def show(findings: list[Finding]) -> None:
    """Print a line for each finding, and below it the advice.

    Lines are not wrapped in a narrow terminal, so that commands can be copied.
    """
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        state = typer.style(f"{finding.state:7}", fg=_COLOURS[finding.state])
        typer.echo(f"{state}  {finding.topic:{width}}  {finding.what}")
        if finding.advice:
            typer.echo(f"         {finding.advice}")


def _python() -> Finding:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "ok", version)
    return Finding("python", "broken", version, "use Python 3.11, 3.12 or 3.13")


def _machine() -> Finding:
    cores = os.cpu_count() or 1
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        memory = f", {gib:.1f} GiB of memory"
    return Finding("machine", "ok", f"{platform.machine()}, {cores} cores{memory}")


def _packages(names: tuple[str, ...], if_absent: State, advice: str) -> list[Finding]:
    findings = []
    for name in names:
        if importlib.util.find_spec(name) is not None:
            findings.append(Finding(name, "ok", importlib.metadata.version(name)))
        elif name == "uvloop":
            slow = "not installed: about half the speed"
            findings.append(Finding(name, "note", slow, "pip install uvloop"))
        else:
            findings.append(Finding(name, if_absent, "not installed", advice))
    return findings


def _accelerator() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("gpu", "note", "no NVIDIA driver: engines run on the CPU")
    query = [tool, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("gpu", "broken", f"nvidia-smi fails: {error}", "check the NVIDIA driver")
    return Finding("gpu", "ok", answer.stdout.strip().replace("\n", "; "))


def _descriptors() -> Finding:
    try:
        import resource
    except ImportError:
        return Finding("open files", "note", "no limit known on this system")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 16384:
        return Finding(
            "open files", "note", f"at most {hard}", "raise `ulimit -Hn` for many streams at once"
        )
    return Finding("open files", "ok", "unlimited" if hard == resource.RLIM_INFINITY else str(hard))


def _port(port: int) -> Finding:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return Finding("port 8000", "note", "in use", "choose another: serve --port 8123")
    return Finding("port 8000", "ok", "free")


def _disk() -> Finding:
    cache = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    folder = cache
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder) or "/"
    free = shutil.disk_usage(folder).free / 2**30
    advice = "set HF_HOME to a larger disk before downloading models" if free < 20 else ""
    return Finding(
        "model cache", "note" if advice else "ok", f"{cache}: {free:.0f} GiB free", advice
    )
