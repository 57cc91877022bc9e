"""What the builtin engine loads, from its tables: `python -m parrot_engine.models.supported`.

Prints Markdown; `docs/models.md` holds it. Descriptions are the first lines of the modules.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from parrot_engine.models.families.registry import ENCODERS, FAMILIES
from parrot_engine.quantization.registry import METHODS


def describe() -> dict[str, dict[str, str]]:
    """By name, what the families of models, the encoders and the formats of weights are."""
    return {
        "architectures": {
            name: _summary(family.read_config) for name, family in sorted(FAMILIES.items())
        },
        "encoders": {name: _summary(read) for name, read in sorted(ENCODERS.items())},
        "quantization": {name: _summary(read) for name, read in sorted(METHODS.items())},
    }


def _summary(function: Callable[..., Any]) -> str:
    text = sys.modules[function.__module__].__doc__ or ""
    return text.partition("\n")[0].removesuffix(".")


def as_markdown() -> str:
    """The tables."""
    titles = {
        "architectures": ("Families", "`architectures` of `config.json`", "models"),
        "encoders": ("Encoders", "`architectures` of `config.json`", "models"),
        "quantization": ("Formats", "`quant_method`", "weights"),
    }
    parts = []
    for key, rows in describe().items():
        title, name, what = titles[key]
        lines = [f"## {title}", "", f"| {name} | {what} |", "|---|---|"]
        lines += [f"| `{row}` | {text} |" for row, text in rows.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="parrot-gateway models supported",
        description="Families of models and formats of weights that the builtin engine loads.",
    )
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    options = parser.parse_args(arguments)
    print(json.dumps(describe(), indent=2) if options.json else as_markdown())


if __name__ == "__main__":
    main()
