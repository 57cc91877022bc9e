"""Lists what the engines load: `python -m parrot_engine.models.supported`.

Prints the Markdown of `docs/models.md`. The builtin engine's models come from its tables;
descriptions are the first lines of modules.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from parrot_engine.models.families.registry import ENCODERS, FAMILIES
from parrot_engine.quantization.registry import METHODS

#: Models of the huggingface engine by how they run there; the engine finds out while loading.
_OF_TRANSFORMERS = {
    "batched": "decoders whose attention transformers lets others do, over all keys or a window: "
    "GPT-2, GPT-BigCode (StarCoder), GPT-NeoX (Pythia), StarCoder2, OPT, Phi-1 and 2, Gemma, "
    "Cohere (Command R), Nemotron, EXAONE 4, Seed-OSS, ERNIE 4.5, OLMo 3, Granite MoE, Qwen2-MoE, "
    "DeepSeek-V2 and V3, …",
    "refused": "other attention (Falcon, StableLM, BLOOM, MPT, GPT-J, GPT-Neo); chunked or sparse "
    "attention (Llama 4, DeepSeek-V3.2); some layers without attention (LFM2, Jamba, Qwen3-Next; "
    "Mamba, RWKV, RecurrentGemma); angles that depend on the length (dynamic scaling, LongRoPE); "
    "models that transformers does not load; …",
}


def describe() -> dict[str, dict[str, str]]:
    """Describe, by name, the families, encoders, weight formats and transformers models."""
    return {
        "architectures": {
            name: _summary(family.read_config) for name, family in sorted(FAMILIES.items())
        },
        "encoders": {
            name: _summary(family.read_config) for name, family in sorted(ENCODERS.items())
        },
        "quantization": {name: _summary(read) for name, read in sorted(METHODS.items())},
        "huggingface": dict(_OF_TRANSFORMERS),
    }


def _summary(function: Callable[..., Any]) -> str:
    text = sys.modules[function.__module__].__doc__ or ""
    return text.partition("\n")[0].removesuffix(".")


def as_markdown() -> str:
    """Return the tables."""
    titles = {
        "architectures": ("Families", "`architectures` of `config.json`", "models"),
        "encoders": ("Encoders", "`architectures` of `config.json`", "models"),
        "quantization": ("Formats", "`quant_method`", "weights"),
        "huggingface": ("On the huggingface engine", "runs", "models"),
    }
    parts = []
    for key, rows in describe().items():
        title, name, what = titles[key]
        lines = [f"## {title}", "", f"| {name} | {what} |", "|---|---|"]
        mark = "" if key == "huggingface" else "`"
        lines += [f"| {mark}{row}{mark} | {text} |" for row, text in rows.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="parrot-gateway models supported",
        description="Families of models and formats of weights that the engines load.",
    )
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    options = parser.parse_args(arguments)
    print(json.dumps(describe(), indent=2) if options.json else as_markdown())


if __name__ == "__main__":
    main()
