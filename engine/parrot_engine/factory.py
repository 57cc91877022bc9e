"""From options to a running engine: which kind, which folder, which name.

Knows the engines only by name and imports the chosen one; a machine without transformers can use
the builtin engine, and the reverse.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_type_hints

from parrot_engine.exceptions import CheckpointError, SettingsError, UnsupportedModelError
from parrot_engine.hub import resolve_model, served_name
from parrot_engine.progress import ProgressLines
from parrot_engine.protocol import Engine
from parrot_engine.text.assets import TextAssets, TextAssetsError, load_text_assets

_log = logging.getLogger(__name__)

EngineKind: TypeAlias = Literal["auto", "builtin", "huggingface"]

_KINDS = ("auto", "builtin", "huggingface")

#: Options that only the builtin engine has; None leaves them to its own defaults.
_BUILTIN_OPTIONS = (
    "block_size",
    "num_blocks",
    "max_batch_size",
    "max_batch_tokens",
    "max_context_tokens",
    "prefix_caching",
    "num_threads",
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What to load and how. None stands for the engine's own default."""

    #: A folder, a hub id, or `parrot-demo`.
    model: str
    #: The name under which it is served; the folder's name or the hub id by default.
    name: str | None = None
    #: `auto` takes the builtin engine where it knows the model.
    kind: EngineKind = "auto"
    device: str = "auto"
    dtype: str = "auto"
    block_size: int | None = None
    num_blocks: int | None = None
    max_batch_size: int | None = None
    max_batch_tokens: int | None = None
    max_context_tokens: int | None = None
    prefix_caching: bool | None = None
    num_threads: int | None = None
    #: Run Python code that comes with the checkpoint (huggingface engine only).
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Raises `SettingsError` for a kind that does not exist."""
        if self.kind not in _KINDS:
            raise SettingsError("kind", f"{self.kind!r} is none of {', '.join(_KINDS)}")

    @classmethod
    def from_json(cls, text: str) -> EngineOptions:
        """Options from a JSON object.

        Raises:
            SettingsError: not an object, an unknown key, or a value of another type.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise SettingsError("options", f"not valid JSON: {error}") from error
        if not isinstance(values, dict) or "model" not in values:
            raise SettingsError("options", "must be a JSON object with at least 'model'")
        hints = get_type_hints(cls)
        for key, value in values.items():
            if key not in hints:
                raise SettingsError(key, "there is no such option")
            if key != "kind" and not _fits(value, hints[key]):
                raise SettingsError(key, f"{value!r} has the wrong type")
        return cls(**values)


class LoadedEngine(NamedTuple):
    """An engine that is ready to run, and the model's tokenizer and templates."""

    engine: Engine
    text: TextAssets


def load_engine(options: EngineOptions) -> LoadedEngine:
    """Find the model and load it; may download, takes as long as it takes.

    Raises:
        ModelError: the model cannot be found, read or run.
        SettingsError: an option does not fit model or machine.
    """
    folder = resolve_model(options.model, with_code=options.trust_remote_code)
    name = options.name or served_name(options.model)
    try:
        text = load_text_assets(folder)
    except TextAssetsError as error:
        raise CheckpointError(str(error)) from error
    if options.kind == "huggingface":
        return LoadedEngine(_load_huggingface(folder, options, name), text)
    try:
        return LoadedEngine(_load_builtin(folder, options, name), text)
    except UnsupportedModelError as error:
        if options.kind == "builtin":
            raise
        _log.warning("%s: %s. Using the huggingface engine.", name, error)
    return LoadedEngine(_load_huggingface(folder, options, name), text)


def _load_builtin(folder: Path, options: EngineOptions, name: str) -> Engine:
    from parrot_engine.builtin.engine import BuiltinEngine
    from parrot_engine.builtin.settings import BuiltinSettings

    chosen: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
    for option in _BUILTIN_OPTIONS:
        value = getattr(options, option)
        if value is not None:
            chosen[option] = value
    progress = ProgressLines("loading weights")
    return BuiltinEngine.load(folder, BuiltinSettings(**chosen), model=name, progress=progress)


def _load_huggingface(folder: Path, options: EngineOptions, name: str) -> Engine:
    try:
        from parrot_engine.huggingface import HuggingFaceEngine, HuggingFaceSettings
    except ImportError as error:
        raise SettingsError(
            "kind", f"the huggingface engine needs the transformers package ({error})"
        ) from error
    known = {item.name for item in fields(HuggingFaceSettings)}
    chosen = {
        item.name: getattr(options, item.name)
        for item in fields(options)
        if item.name in known and getattr(options, item.name) is not None
    }
    return HuggingFaceEngine.load(folder, HuggingFaceSettings(**chosen), model=name)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(value, bool):
        return hint in (bool, bool | None)
    return isinstance(value, hint)
