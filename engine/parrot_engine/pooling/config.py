"""Reads how a checkpoint pools a text, from the files of sentence-transformers.

`modules.json` lists the modules after the transformer: pooling, normalisation, products.
`config_sentence_transformers.json` has prompts, `sentence_bert_config.json` the maximum length.
Unknown modules and settings are refused by name, because ignoring one would give wrong vectors
without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from parrot_engine.exceptions import CheckpointError, PoolingModelError
from parrot_engine.models.checkpoint import read_json, read_json_list, read_optional_json
from parrot_engine.models.families.registry import ENCODERS, FAMILIES, causal_name

PoolingMode: TypeAlias = Literal["cls", "lasttoken", "max", "mean"]

#: Names of the modes in older files.
_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}
_SCORES_PAIRS = "ForSequenceClassification"
#: Modules of a reranker that is a language model and scores by its next token.
_ASKS_FOR_A_TOKEN = ["Transformer", "LogitScore"]
_MODULES = "modules.json"
_SENTENCE_TRANSFORMERS = "config_sentence_transformers.json"
_TRANSFORMER = "sentence_bert_config.json"


class Dense(NamedTuple):
    """A product after the pooling."""

    folder: str
    in_size: int
    out_size: int
    bias: bool
    tanh: bool


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The computation from hidden states to a vector or a score."""

    task: Literal["embed", "score"]
    mode: PoolingMode
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    #: True if the logistic function is applied to scores.
    sigmoid: bool = False
    #: Maximum tokens of a text that the checkpoint's authors recommend.
    max_tokens: int | None = None
    lowercase: bool = False
    #: See `PoolingInfo`.
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    #: A score is the logit of the first token after a pair, minus that of the second, if any.
    logit_tokens: tuple[int, int | None] | None = None
    #: See `PoolingInfo`.
    pair_template: Mapping[str, Any] | None = None
    #: True if the model also generates text.
    also_generates: bool = False
    is_toy: bool = False


def read_pooling(folder: Path) -> PoolingConfig | None:
    """Return how a checkpoint pools texts; None if it only generates.

    Without files of sentence-transformers, an encoder's vector is the mean of its tokens', which is
    the default of that library.

    Raises:
        CheckpointError: a file is broken or has an impossible value.
        PoolingModelError: a module or mode is not supported.
    """
    raw = read_json(folder / "config.json")
    names = raw.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    if architecture.endswith(_SCORES_PAIRS):
        return _scores(folder, raw, architecture)
    if (folder / _MODULES).exists():
        return _vectors(folder, raw, architecture)
    if architecture in ENCODERS or (architecture.endswith("Model") and _is_decoder(architecture)):
        return _with_details(folder, raw, PoolingConfig("embed", "mean"))
    return None


def _is_decoder(architecture: str) -> bool:
    return causal_name(architecture) in FAMILIES


def _scores(folder: Path, raw: Mapping[str, Any], architecture: str) -> PoolingConfig:
    """Return the settings of a classifier with one label."""
    if architecture not in ENCODERS and not _is_decoder(architecture):
        raise PoolingModelError(f"architecture {architecture!r} ({_known()})")
    mode: PoolingMode = "lasttoken"
    if architecture in ENCODERS:
        mode = raw.get("classifier_pooling", "cls")
        if mode not in ("cls", "mean"):
            raise PoolingModelError(f"pooling {mode!r} of scores", architecture)
    return _of_pairs(folder, raw, architecture, PoolingConfig("score", mode))


def _logit_scores(
    folder: Path, raw: Mapping[str, Any], architecture: str, path: str
) -> PoolingConfig:
    """Return the settings of a language model that scores by its next token."""
    if not _is_decoder(architecture):
        raise PoolingModelError("scores from logits of an encoder", architecture)
    file = f"{path}/config.json"
    given = read_json(folder / path / "config.json")
    yes, no = (given.get(key) for key in ("true_token_id", "false_token_id"))
    size = raw.get("vocab_size", 0)
    for token in (yes, yes if no is None else no):
        if not isinstance(token, int) or not 0 <= token < size:
            raise CheckpointError(f"{file}: {token!r} is no token of a vocabulary of {size}")
    if given.get("module_input_name", "causal_logits") != "causal_logits":
        raise PoolingModelError(f"scores from {given['module_input_name']!r}", architecture)
    config = PoolingConfig("score", "lasttoken", logit_tokens=(cast("int", yes), no))
    config = _of_pairs(folder, raw, architecture, config)
    if config.pair_template is None:
        raise PoolingModelError("pairs that the chat template does not write", architecture)
    return config


def _of_pairs(
    folder: Path, raw: Mapping[str, Any], architecture: str, base: PoolingConfig
) -> PoolingConfig:
    """Add the step from logits to a score, and the form of a pair."""
    saved = read_optional_json(folder / _SENTENCE_TRANSFORMERS) or {}
    given = raw.get("sentence_transformers")
    activation = raw.get("sbert_ce_default_activation_function")
    if isinstance(given, Mapping):
        activation = given.get("activation_fn", activation)
    if saved.get("model_type") == "CrossEncoder":
        activation = saved.get("activation_fn", activation)
    kind = str(activation or "Sigmoid").rpartition(".")[2]
    if kind not in ("Identity", "Sigmoid"):
        raise PoolingModelError(f"activation {activation!r} of scores", architecture)
    prompts, default = _prompts(saved)
    template = _pair_template(folder, architecture)
    if template is None and default is not None and prompts[default]:
        raise PoolingModelError(f"the prompt {default!r} before pairs", architecture)
    limits = read_optional_json(folder / _TRANSFORMER) or {}
    return replace(
        base,
        sigmoid=kind == "Sigmoid",
        max_tokens=_longest(limits),
        prompts=prompts,
        default_prompt=default,
        pair_template=template,
    )


def _pair_template(folder: Path, architecture: str) -> Mapping[str, Any] | None:
    """Return the variables of the template; see `PoolingInfo`. None unless the checkpoint says that
    its template writes pairs.
    """
    # These import jinja2 and tokenizers, which engines without text do not need.
    from parrot_engine.text.chat import ChatTemplateError
    from parrot_engine.text.loading import load_chat_template
    from parrot_engine.text.pairs import write_pair

    given = read_optional_json(folder / _TRANSFORMER) or {}
    modalities = given.get("modality_config")
    if not isinstance(modalities, Mapping) or "message" not in modalities:
        return None
    if (modalities["message"] or {}).get("format", "flat") != "flat":
        raise PoolingModelError("messages of several parts", architecture)
    variables = dict((given.get("processing_kwargs") or {}).get("chat_template") or {})
    variables.pop("restore_suffix", None)
    for name, value in variables.items():
        if not isinstance(value, str | int | float | bool):
            raise PoolingModelError(f"{value!r} as {name!r} of the chat template", architecture)
    chat = load_chat_template(folder)
    try:
        written = {
            write_pair(chat, pair, None, variables) for pair in (("a", "b"), ("0", "b"), ("a", "1"))
        }
    except ChatTemplateError as error:
        raise PoolingModelError(f"a chat template that writes no pairs: {error}") from error
    if len(written) < 3:
        raise PoolingModelError("a chat template that leaves out query or document", architecture)
    return variables


def _known() -> str:
    return "known: " + ", ".join([*ENCODERS, *FAMILIES])


def _vectors(folder: Path, raw: Mapping[str, Any], architecture: str) -> PoolingConfig:
    if architecture not in ENCODERS and not _is_decoder(architecture):
        raise PoolingModelError(f"architecture {architecture!r} ({_known()})")
    kinds = [_module(entry) for entry in read_json_list(folder / _MODULES)]
    if [kind for kind, _ in kinds] == _ASKS_FOR_A_TOKEN:
        return _logit_scores(folder, raw, architecture, kinds[1][1])
    saved = read_optional_json(folder / _SENTENCE_TRANSFORMERS) or {}
    if saved.get("model_type") == "CrossEncoder":
        names = ", ".join(kind for kind, _ in kinds)
        raise PoolingModelError(f"scores from the modules {names}", architecture)
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
    """Return kind and folder of a module."""
    if not isinstance(entry, Mapping):
        raise CheckpointError("modules.json must hold a list of objects")
    path, kind = str(entry.get("path") or ""), str(entry.get("type") or "").rpartition(".")[2]
    # A name in a file must not lead out of the checkpoint's folder.
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
    limits = read_optional_json(folder / _TRANSFORMER) or {}
    given = read_optional_json(folder / _SENTENCE_TRANSFORMERS) or {}
    prompts, default = _prompts(given)
    sizes = raw.get("matryoshka_dimensions") or ()
    if not isinstance(sizes, list | tuple) or not all(isinstance(size, int) for size in sizes):
        raise CheckpointError(f"config.json: `matryoshka_dimensions` is {sizes!r}")
    extension = given.get("parrot") or {}
    return replace(
        base,
        max_tokens=_longest(limits),
        lowercase=bool(limits.get("do_lower_case", False)),
        prompts=prompts,
        default_prompt=default,
        is_matryoshka=bool(raw.get("is_matryoshka") or sizes),
        matryoshka_dimensions=tuple(sizes),
        also_generates=bool(extension.get("also_generates", False)),
        is_toy=bool(extension.get("toy", False)),
    )


def _prompts(given: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default."""
    prompts = given.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(p, str) for p in prompts.values()):
        raise CheckpointError(f"{_SENTENCE_TRANSFORMERS}: `prompts` must name texts")
    default = given.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(f"{_SENTENCE_TRANSFORMERS}: there is no prompt {default!r}")
    return dict(prompts), default


def _longest(limits: Mapping[str, Any]) -> int | None:
    longest = limits.get("max_seq_length")
    if longest is not None and (not isinstance(longest, int) or longest < 1):
        raise CheckpointError(f"{_TRANSFORMER}: `max_seq_length` is {longest!r}")
    return longest
