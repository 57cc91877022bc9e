"""Finds the folder on this machine for a model's name.

A name is a folder, the bundled demo model, or a Hugging Face repository. Only servable files are
downloaded: no pickled weights, and code only on request.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from parrot_engine.exceptions import ModelError
from parrot_engine.progress import download_bar

#: The bundled model, for trials without a download.
DEMO_MODEL = "parrot-demo"

_ASSETS = Path(__file__).parents[1] / "assets"
_DEMO_FOLDER = _ASSETS / "demo"
#: Configurations without weights, by name.
_SHAPES_FOLDER = _ASSETS / "shapes"

#: Files that are downloaded; weights first.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken")

#: `name` or `owner/name`, as the hub allows them.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z", re.ASCII)


#: Reasons why a repository cannot be downloaded.
HubFailure: TypeAlias = Literal[
    "model_not_found",
    "model_gated",
    "hub_unreachable",
    "disk_full",
    "download_too_large",
    "no_safetensors",
    "download_failed",
]


class ModelNotFoundError(ModelError):
    """A name that is neither a model folder nor an available repository."""

    def __init__(self, message: str, failure: HubFailure = "model_not_found") -> None:
        super().__init__(message)
        self.failure: HubFailure = failure


def shape_names() -> list[str]:
    """Return the names of well-known models' shapes, which need no download for random weights."""
    return sorted(folder.name for folder in _SHAPES_FOLDER.iterdir() if folder.is_dir())


def resolve_model(name_or_path: str, *, with_code: bool = False, with_weights: bool = True) -> Path:
    """Return a model's folder, downloading it if needed (resumes; existing files are kept).

    Args:
        name_or_path: a folder, `parrot-demo`, or a hub id such as `Qwen/Qwen3-0.6B`.
        with_code: true includes the repository's Python files.
        with_weights: False for only the configuration; then `shape_names` are accepted too.

    Raises:
        ModelNotFoundError: the model is missing; the message says what to do.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _checked(path)
    if name_or_path == DEMO_MODEL:
        return _checked(_DEMO_FOLDER)
    if name_or_path in shape_names():
        if with_weights:
            raise ModelNotFoundError(
                f"{name_or_path} is a shape without weights, for measuring: give it dummy weights."
            )
        return _checked(_SHAPES_FOLDER / name_or_path)
    if path.is_file() or path.suffix.lower() == ".gguf":
        raise ModelNotFoundError(_file_advice(path))
    if not _HUB_ID.match(name_or_path):
        raise ModelNotFoundError(
            f"There is no folder {name_or_path}, and it is not the name of a hub repository "
            "(OWNER/NAME)."
        )
    patterns = PATTERNS if with_weights else PATTERNS[1:]
    with hub_failures(name_or_path):
        from huggingface_hub import snapshot_download

        patterns = (*patterns, *(["*.py"] if with_code else []))
        folder = snapshot_download(
            name_or_path, allow_patterns=list(patterns), tqdm_class=download_bar()
        )
    return _checked(Path(folder))


def is_hub_id(name: str) -> bool:
    """Return true if a name has the form of a repository's."""
    return _HUB_ID.match(name) is not None


def served_name(name_or_path: str) -> str:
    """Return the default model id for clients: the folder's name or the hub id."""
    path = Path(name_or_path).expanduser()
    return path.resolve().name if path.is_dir() else name_or_path


def _file_advice(path: Path) -> str:
    if path.suffix.lower() != ".gguf":
        return f"{path} is a file: give the folder that holds config.json and *.safetensors."
    return (
        f"{path} is a GGUF file, which the engines do not read. Give the folder or the hub id of "
        "the checkpoint that it was made from (config.json and *.safetensors), or let llama.cpp "
        f"serve it (llama-server -m {path} --port 8080) and pass its calls on with "
        "--upstream llama=http://127.0.0.1:8080/v1."
    )


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        gguf = next(folder.glob("*.gguf"), None)
        if gguf is not None:
            raise ModelNotFoundError(_file_advice(gguf))
        raise ModelNotFoundError(f"The folder {folder} holds no model: it has no config.json.")
    return folder


@contextmanager
def hub_failures(repository: str) -> Iterator[None]:
    """Convert failures of a repository within the block to `ModelNotFoundError`."""
    try:
        from huggingface_hub import constants
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise ModelNotFoundError(
            f"Downloading {repository} needs the huggingface_hub package; install it, or give a "
            "folder.",
            "download_failed",
        ) from error
    try:
        yield
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"The hub repository {repository} is gated: accept its terms on huggingface.co and "
            "set HF_TOKEN.",
            "model_gated",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"There is no folder and no public hub repository named {repository}. For a private "
            "one, set HF_TOKEN."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ModelNotFoundError(
                f"The disk is full: {repository} does not fit into {constants.HF_HUB_CACHE}. Make "
                "room, or set HF_HOME to a folder on another disk; what is there is kept.",
                "disk_full",
            ) from error
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise ModelNotFoundError(
            f"{repository} is not on this machine, and the Hugging Face hub cannot be "
            f"reached{offline}. Give a folder, or '{DEMO_MODEL}', which needs no download.",
            "hub_unreachable",
        ) from error
    except ModelError:
        raise
    except Exception as error:
        # NOTE: transfer errors are exceptions of the HTTP client, which differs between major
        # versions of the library.
        raise ModelNotFoundError(
            f"{repository} cannot be downloaded: {type(error).__name__}: {error}", "download_failed"
        ) from error
