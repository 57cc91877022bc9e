"""The documentation knows every setting, command and route, and names nothing that is not there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from parrot_engine.settings import BuiltinSettings
from parrot_scheduler.config import SchedulerConfig
from pydantic import BaseModel
from typer.main import get_command

from parrot_gateway.cli.main import app
from parrot_gateway.settings.model import (
    BatchSettings,
    EngineLinkSettings,
    LinkingSettings,
    ModelSettings,
    ParrotV3Settings,
    ResponseSettings,
    SchedulerSettings,
    ServerSettings,
    SessionSettings,
    StreamFailureSettings,
    StreamSettings,
    TelemetrySettings,
    UpstreamSettings,
)

ROOT = Path(__file__).parent.parent
SETTINGS = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return SETTINGS.split(f"\n## {title}\n")[1].split("\n## ")[0]


SECTIONS: dict[str, type[BaseModel]] = {
    "server": ServerSettings,
    "models": ModelSettings,
    "upstreams": UpstreamSettings,
    "engines": EngineLinkSettings,
    "scheduler": SchedulerSettings,
    "sessions": SessionSettings,
    "linking": LinkingSettings,
    "parrot_v3": ParrotV3Settings,
    "responses": ResponseSettings,
    "streams": StreamSettings,
    "batches": BatchSettings,
    "telemetry": TelemetrySettings,
}
#: Defaults that are found out at run time, or depend on the request; described in words.
IN_WORDS = {
    "models": {"name": "hub id, folder's name", "num_blocks": "from memory",
               "kv_cache_bytes": "from memory", "host_blocks": "from `host_memory_gb`",
               "host_min_tokens": "measured",
               "max_background_tokens": "a quarter of that, on a GPU 255",
               "background_burst_tokens": "as that, on a GPU 765",
               "long_prompt_tokens": "none, on a GPU 32768",
               "speculative_batch_tokens": "64, on a GPU 256",
               "max_context_tokens": "the model's", "seed": "fresh at each start",
               "idle_unload_s": "`engines.idle_unload_s`"},
    "upstreams": {"models": "asks it", "forward_authorization": "see below"},
    "scheduler": dict.fromkeys(("admission", "order", "place", "keep"), "the set-up's"),
    "parrot_v3": {"keyless": "only without a key"},
    "batches": {"folder": "`~/.local/share/parrot-gateway`"},
}  # fmt: skip
UNITS = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def documented_defaults(text: str) -> dict[str, str]:
    """By setting, what a table says of its default."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.startswith("| `"):
            continue
        names, defaults = line.split("|")[1:3]
        settings = re.findall(r"`(\w+)`", names)
        cells = [defaults.strip()] * len(settings)
        if len(settings) > 1 and defaults.count(",") == len(settings) - 1:
            cells = [cell.strip() for cell in defaults.split(",")]
        found |= dict(zip(settings, cells, strict=True))
    return found


def written(value: object) -> set[str]:
    """How a default may stand in a table."""
    if value is None:
        return {""}
    if isinstance(value, bool):
        return {str(value).lower()}
    if isinstance(value, int | float):
        forms = {f"{value:g}" if isinstance(value, float) else str(value)}
        if value == int(value):
            forms |= {f"{int(value):,}".replace(",", " "), str(int(value))}
        for unit, size in UNITS.items():
            if value % size == 0 and 0 < value // size < 1024:
                forms.add(f"{int(value // size)} {unit}")
        return forms
    if isinstance(value, BaseModel):
        name, first = next(iter(value))
        return {f"`{name}: {first}`"}
    if isinstance(value, tuple):
        return {", ".join(f"`{item}`" for item in value)}
    return {str(value)}


@pytest.mark.parametrize("title", SECTIONS)
def test_settings_tables_are_complete_and_true(title: str) -> None:
    model, documented = SECTIONS[title], documented_defaults(section(title))
    assert set(documented) == set(model.model_fields)
    for name, field in model.model_fields.items():
        words = IN_WORDS.get(title, {}).get(name)
        if words is not None:
            assert (documented[name], field.get_default()) == (words, None), name
        elif field.is_required():
            assert documented[name] == "", name
        elif title == "models" and field.get_default() is None:
            # Left to the engine, whose default depends on the device.
            cpu = getattr(BuiltinSettings.for_device("cpu"), name)
            cuda = getattr(BuiltinSettings.for_device("cuda"), name)
            forms = {form for form in written(cpu) if cpu == cuda}
            forms |= {f"{a}, on a GPU {b}" for a in written(cpu) for b in written(cuda)}
            assert documented[name] in forms, name
        else:
            assert documented[name] in written(field.get_default()), name


def test_the_table_of_broken_streams_is_complete_and_true() -> None:
    text = (ROOT / "docs" / "failover.md").read_text(encoding="utf-8")
    documented = documented_defaults(text.partition("below `stream_failure`")[2].split("\n\n")[1])
    fields = StreamFailureSettings.model_fields
    assert set(documented) == set(fields)
    for name, field in fields.items():
        assert documented[name] in written(field.get_default()), name


@pytest.mark.parametrize(
    ("value", "wrong"),
    [(64 * 1024**2, "32 MiB"), (10_000, "1 000"), (True, "false"), (0.25, "0.2")],
)
def test_a_wrong_default_would_be_found(value: object, wrong: str) -> None:
    assert wrong not in written(value)


def test_every_scheduler_setting_is_the_schedulers() -> None:
    """The gateway's section and the scheduler's own configuration say the same."""
    ours, theirs = SchedulerSettings(), SchedulerConfig()
    for name in set(SchedulerSettings.model_fields) & {each.name for each in fields(theirs)}:
        value = getattr(ours, name)
        assert value is None or value == getattr(theirs, name), name


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    group: Any = get_command(app)
    names = group.list_commands(typer.Context(group))
    assert {"serve", "bench"} <= set(names)
    for name in names:
        assert f"parrot-gateway {name}" in page


@pytest.mark.parametrize("file", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]))
def test_links_between_documents_work(file: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", file.read_text(encoding="utf-8")):
        assert (file.parent / target).exists(), target
