"""The folder that files and batches are kept in, which one process has at a time.

    lock                    held by the process that uses the folder
    uploads/                what is still being written; emptied when the folder is opened
    files/ID.json, ID       what is known of a file, and its content
    batches/ID.json         the state of a batch
    batches/ID.output, ID.errors    answers so far, a line of JSON each

Every JSON file is replaced as a whole, so that a process that is killed leaves the state before or
after a change, never half of one. All functions here block; call them in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from parrot_gateway.exceptions import DiskFullError

_T = TypeVar("_T")


class FolderInUseError(Exception):
    """Another process has the folder."""


@contextmanager
def full_disk_refused() -> Iterator[None]:
    """Turn the error of a write that found no room into one for the client.

    Raises:
        DiskFullError: the disk, or this user's share of it, is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(
            "The disk on which this gateway keeps files and batches is full (setting "
            "batches.folder); nothing was kept."
        ) from None


class DataFolder:
    """The folder, opened.

    Args:
        path: made when it is not there, for this user only.

    Raises:
        FolderInUseError: another process has it.
        OSError: it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = path / "files"
        self.batches = path / "batches"
        self.uploads = path / "uploads"
        for folder in (path, self.files, self.batches, self.uploads):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise FolderInUseError(f"{path} is used by another process") from error
        for left in self.uploads.iterdir():
            left.unlink()

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._lock)

    def new_upload(self) -> Path:
        """Where something can be written that has no name yet."""
        return self.uploads / secrets.token_hex(16)


def write_json(path: Path, value: Any) -> None:
    """Replace a file as a whole by the JSON of `value`; it is on the disk when this returns."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Names made or changed in a folder are on the disk when this returns."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_all(folder: Path, kind: type[_T]) -> Iterator[_T]:
    """All objects of a folder's JSON files.

    Raises:
        OSError: one cannot be read.
        msgspec.DecodeError: one is no JSON of that kind.
    """
    for path in sorted(folder.glob("*.json")):
        yield msgspec.json.decode(path.read_bytes(), type=kind)


def remove(*paths: Path) -> None:
    """Delete files that may not be there."""
    for path in paths:
        with suppress(FileNotFoundError):
            path.unlink()
