"""The folder of files and batches, used by one process at a time.

    lock                    held by the process that uses the folder
    uploads/                unfinished files; emptied when the folder is opened
    files/ID.json, ID       description and content of a file
    batches/ID.json         state of a batch
    batches/ID.output, ID.errors    answers so far, a line of JSON each

Every JSON file is replaced as a whole, so a killed process leaves the state before or after a
change, never half of it. All functions here block; call them in a thread.
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
    """Another process uses the folder."""


@contextmanager
def full_disk_refused() -> Iterator[None]:
    """Turn the error of a write to a full disk into one for the client.

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
        path: created if it does not exist, for this user only.

    Raises:
        FolderInUseError: another process uses it.
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
        """Release the folder for another process."""
        os.close(self._lock)

    def new_upload(self) -> Path:
        """Return a path for a new file that has no id yet."""
        return self.uploads / secrets.token_hex(16)


def write_json(path: Path, value: Any) -> None:
    """Replace a file as a whole by the JSON of `value`; it is on disk on return."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder: names made or changed in it are on disk on return."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_all(folder: Path, kind: type[_T]) -> Iterator[_T]:
    """Yield the objects of a folder's JSON files.

    Raises:
        OSError: one cannot be read.
        msgspec.DecodeError: one is not JSON of that kind.
    """
    for path in sorted(folder.glob("*.json")):
        yield msgspec.json.decode(path.read_bytes(), type=kind)


def remove(*paths: Path) -> None:
    """Delete files that may not exist."""
    for path in paths:
        with suppress(FileNotFoundError):
            path.unlink()
