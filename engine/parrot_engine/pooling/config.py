"""What a checkpoint makes of a text: the files of sentence-transformers, read and typed.

`modules.json` lists what follows the transformer: pooling, normalisation, products. Prompts are in
`config_sentence_transformers.json`, the longest text in `sentence_bert_config.json`. Whatever is
not understood is refused by name: a vector computed otherwise would be wrong in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from parrot_engine.exceptions import CheckpointError, PoolingModelError
from parrot_engine.models.checkpoint import read_json, read_json_list, read_optional_json
from parrot_engine.models.families.registry import ENCODERS, FAMILIES, causal_name

PoolingMode: TypeAlias = Literal["cls", "lasttoken", "max", "mean"]

#: How each mode is named in older files.
_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}
_SCORES_PAIRS = "ForSequenceClassification"


class Dense(NamedTuple):
    """A product behind the pooling."""

    folder: str
    in_size: int
    out_size: int
    bias: bool
    tanh: bool


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """From hidden states to a vector or a score."""

    task: Literal["embed", "score"]
    mode: PoolingMode
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    #: Scores go through the logistic function.
    sigmoid: bool = False
    #: Longest text that the checkpoint's makers recommend.
    max_tokens: int | None = None
    lowercase: bool = False
    #: See `PoolingInfo`.
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    #: The model generates as well.
    also_generates: bool = False
    is_toy: bool = False


def read_pooling(folder: Path) -> PoolingConfig | None:
    """What a checkpoint makes of texts; None where it generates and nothing else.

    Without files of sentence-transformers the vector of an encoder is the mean of its tokens', as
    there.

    Raises:
        CheckpointError: a file is broken or says what cannot be.
        PoolingModelError: a module or a mode that is not known here.
    """
    raw = read_json(folder / "config.json")
    names = raw.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    if architecture.endswith(_SCORES_PAIRS):
        return _scores(raw, architecture)
    if (folder / "modules.json").exists():
        return _vectors(folder, raw, architecture)
    if architecture in ENCODERS or (architecture.endswith("Model") and _is_decoder(architecture)):
        return _with_details(folder, raw, PoolingConfig("embed", "mean"))
    return None


def _is_decoder(architecture: str) -> bool:
    return causal_name(architecture) in FAMILIES


def _scores(raw: Mapping[str, Any], architecture: str) -> PoolingConfig:
    if architecture not in ENCODERS and not _is_decoder(architecture):
        raise PoolingModelError(f"architecture {architecture!r} ({_known()})")
    given = raw.get("sentence_transformers")
    activation = raw.get("sbert_ce_default_activation_function")
    if isinstance(given, Mapping):
        activation = given.get("activation_fn", activation)
    kind = str(activation or "Sigmoid").rpartition(".")[2]
    if kind not in ("Identity", "Sigmoid"):
        raise PoolingModelError(f"activation {activation!r} of scores", architecture)
    mode: PoolingMode = "lasttoken"
    if architecture in ENCODERS:
        mode = raw.get("classifier_pooling", "cls")
        if mode not in ("cls", "mean"):
            raise PoolingModelError(f"pooling {mode!r} of scores", architecture)
    return PoolingConfig("score", mode, sigmoid=kind == "Sigmoid")


def _known() -> str:
    return "known: " + ", ".join([*ENCODERS, *FAMILIES])


def _vectors(folder: Path, raw: Mapping[str, Any], architecture: str) -> PoolingConfig:
    if architecture not in ENCODERS and not _is_decoder(architecture):
        raise PoolingModelError(f"architecture {architecture!r} ({_known()})")
    kinds = [_module(entry) for entry in read_json_list(folder / "modules.json")]
    mode: PoolingMode | None = None
    dense: list[Dense] = []
    normalize = False
    for position, (kind, path) in enumerate(kinds):
        if kind == "Transformer" and position == 0:
            if path:
                raise PoolingModelError(f"a transformer in the folder {path!r}", architecture)
        elif kind == "Pooling" and mode is None:
            mode = _mode(read_json(folder / path / "config.json"), architecture)
        elif kind == "Dense" and mode is not None and not normalize:
            dense.append(_dense(path, read_json(folder / path / "config.json"), architecture))
        elif kind == "Normalize" and mode is not None:
            normalize = True
        else:
            raise PoolingModelError(f"the module {kind!r} at place {position}", architecture)
    if mode is None:
        raise CheckpointError("modules.json lists no Pooling")
    config = PoolingConfig("embed", mode, tuple(dense), normalize)
    return _with_details(folder, raw, config)


def _module(entry: Any) -> tuple[str, str]:
    """Kind and folder of a module."""
    if not isinstance(entry, Mapping):
        raise CheckpointError("modules.json must hold a list of objects")
    path, kind = str(entry.get("path") or ""), str(entry.get("type") or "").rpartition(".")[2]
    # A name in a file must not lead out of the checkpoint's directory.
    if Path(path).name != path or path == "..":
        raise CheckpointError(f"modules.json names a folder outside the checkpoint: {path}")
    return kind, path


def _mode(raw: Mapping[str, Any], architecture: str) -> PoolingMode:
    chosen = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value]
    single = raw.get("pooling_mode")
    if single is not None:
        chosen = [single] if isinstance(single, str) else list(single)
    if len(chosen) != 1:
        raise PoolingModelError(f"{len(chosen)} modes of pooling at once", architecture)
    mode = _MODES.get(chosen[0], chosen[0])
    if mode not in _MODES.values():
        raise PoolingModelError(f"pooling {mode!r} ({', '.join(_MODES.values())})", architecture)
    if raw.get("include_prompt") is False:
        raise PoolingModelError("pooling that leaves the prompt out", architecture)
    return cast("PoolingMode", mode)


def _dense(path: str, raw: Mapping[str, Any], architecture: str) -> Dense:
    activation = str(raw.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ("Identity", "Tanh"):
        raise PoolingModelError(f"a product with activation {activation!r}", architecture)
    sizes = [raw.get(key) for key in ("in_features", "out_features")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise CheckpointError(f"{path}/config.json: sizes of the product are {sizes}")
    in_size, out_size = cast("list[int]", sizes)
    return Dense(path, in_size, out_size, bool(raw.get("bias", True)), activation == "Tanh")


def _with_details(folder: Path, raw: Mapping[str, Any], base: PoolingConfig) -> PoolingConfig:
    limits = read_optional_json(folder / "sentence_bert_config.json") or {}
    given = read_optional_json(folder / "config_sentence_transformers.json") or {}
    prompts = given.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(p, str) for p in prompts.values()):
        raise CheckpointError("config_sentence_transformers.json: `prompts` must name texts")
    default = given.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(f"config_sentence_transformers.json: there is no prompt {default!r}")
    longest = limits.get("max_seq_length")
    if longest is not None and (not isinstance(longest, int) or longest < 1):
        raise CheckpointError(f"sentence_bert_config.json: `max_seq_length` is {longest!r}")
    sizes = raw.get("matryoshka_dimensions") or ()
    if not isinstance(sizes, list | tuple) or not all(isinstance(size, int) for size in sizes):
        raise CheckpointError(f"config.json: `matryoshka_dimensions` is {sizes!r}")
    extension = given.get("parrot") or {}
    return PoolingConfig(
        base.task,
        base.mode,
        base.dense,
        base.normalize,
        max_tokens=longest,
        lowercase=bool(limits.get("do_lower_case", False)),
        prompts=dict(prompts),
        default_prompt=default,
        is_matryoshka=bool(raw.get("is_matryoshka") or sizes),
        matryoshka_dimensions=tuple(sizes),
        also_generates=bool(extension.get("also_generates", False)),
        is_toy=bool(extension.get("toy", False)),
    )
