"""Reads a checkpoint directory: JSON files and memory-mapped safetensors.

Independent of models. Only safetensors are read: formats that can execute code are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from parrot_engine.exceptions import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raises `CheckpointError` if it is absent or something
    else.
    """
    value = _read(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} of the checkpoint must hold a JSON object")
    return value


def read_json_list(path: Path) -> list[Any]:
    """Read a JSON list from a file; raises like `read_json`."""
    value = _read(path)
    if not isinstance(value, list):
        raise CheckpointError(f"{path.name} of the checkpoint must hold a JSON array")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path.name} of the checkpoint: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path.name} of the checkpoint is not JSON: {error}") from error


def read_optional_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object like `read_json`; return None if the file does not exist."""
    return read_json(path) if path.exists() else None


class TensorFiles:
    """A checkpoint's tensors by name, in one or several memory-mapped files.

    A context manager: tensors must not be used after it exits.
    """

    def __init__(self, directory: Path) -> None:
        """Open all files of `directory`; raises `CheckpointError` if there are none, or broken
        ones.
        """
        #: By name: the file, and the tensor's name there.
        self._files: dict[str, tuple[Any, str]] = {}
        self._stack = ExitStack()
        try:
            for file_name, listed in _shards(directory).items():
                self._open(directory / file_name, listed)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> Iterable[str]:
        return self._files.keys()

    @property
    def dtype(self) -> str:
        """Return the dtype of the first tensor, e.g. `bfloat16`."""
        first = next(iter(self._files))
        return str(self.tensor(first).dtype).removeprefix("torch.")

    def tensor(self, name: str) -> Tensor:
        """Return the tensor `name`, a view of its file if the platform allows it."""
        file, stored_name = self._files[name]
        tensor: Tensor = file.get_tensor(stored_name)
        return tensor

    def rename(self, name_of: Callable[[str], str | None]) -> None:
        """Rename tensors; those that get None disappear."""
        renamed = {name_of(name): place for name, place in self._files.items()}
        self._files = {name: place for name, place in renamed.items() if name is not None}

    def _open(self, path: Path, listed: set[str] | None) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot open {path.name} of the checkpoint: {error}") from error
        names = set(file.keys())
        missing = sorted((listed or set()) - names)
        if missing:
            raise CheckpointError(f"{path.name} lacks tensors that the index lists: {missing}")
        for name in names:
            self._files[name] = file, name


def _shards(directory: Path) -> dict[str, set[str] | None]:
    """Return the file names of the shards, and the tensors that the index lists for each."""
    if (directory / _INDEX).exists():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{_INDEX} has no `weight_map`")
        shards: dict[str, set[str] | None] = {}
        for name, file_name in weight_map.items():
            # A name in the index must not lead out of the checkpoint's directory.
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointError(f"{_INDEX} names a file outside the checkpoint: {file_name}")
            listed = shards.setdefault(file_name, set())
            assert listed is not None
            listed.add(name)
        return shards
    if (directory / _SINGLE).exists():
        return {_SINGLE: None}
    raise CheckpointError(
        f"no {_SINGLE} and no {_INDEX} in {directory.name}; other weight formats are not read"
    )
