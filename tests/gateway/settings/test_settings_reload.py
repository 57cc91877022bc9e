"""Which settings are taken over at run time: every one is said, here and in the documents."""

from __future__ import annotations

import re
from pathlib import Path

from parrot_gateway.settings.model import Settings
from parrot_gateway.settings.reload import RELOADS, changed_fields, fields_of, reload_of

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def test_every_setting_has_an_entry() -> None:
    fields = fields_of(Settings())
    for name in fields:
        assert reload_of(name) in ("live", "file", "restart")
    sections = {name.partition(".")[0] for name in fields}
    assert set(RELOADS) <= set(fields) | sections, "an entry for a setting that there is not"


def test_the_documents_say_the_same() -> None:
    text = OPERATIONS.read_text(encoding="utf-8")
    table = text[text.index("### What is taken over") :]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table[: table.index("\n## ")], re.MULTILINE))
    fields = fields_of(Settings())
    assert set(rows) == {name.partition(".")[0] for name in fields}
    for name in fields:
        section, _, field = name.partition(".")
        row, how = rows[section], RELOADS[section]
        said = how if f"`{field}`" not in row else None
        if said is None:
            said = next(
                word for word in ("live", "file", "restart")
                if re.search(rf"{word}: [^;]*`{field}`", row)
            )  # fmt: skip
        else:
            assert row.startswith(how), name
        assert said == reload_of(name), name


def test_what_differs_is_named() -> None:
    before = Settings()
    after = Settings(server={"port": 1}, aliases={"a": "b"}, engines={"load_wait_s": 1})  # type: ignore[arg-type]
    assert changed_fields(before, before) == []
    assert changed_fields(before, after) == ["server.port", "aliases", "engines.load_wait_s"]
