"""The guide to the LlamaIndex model knows every setting."""

from __future__ import annotations

import re
from pathlib import Path

from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.llms.parrot import Parrot

ROOT = Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs" / "llama-index.md").read_text(encoding="utf-8")


def test_every_setting_is_documented_and_no_other() -> None:
    section = GUIDE.split("## Settings\n")[1].split("\n## ")[0]
    documented: set[str] = set()
    for line in section.splitlines():
        if line.startswith("| `"):
            documented |= set(re.findall(r"`(\w+)`", line.split("|")[1]))
    own = set(Parrot.model_fields) - set(FunctionCallingLLM.model_fields)
    assert documented - {"api_base"} == own
