"""Files of clients: facts in memory, contents on disk.

Each belongs to one tenant; other tenants get the same error as for an unknown id. Number, size and
age are limited.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import msgspec

from parrot_gateway.batches.folder import DataFolder, read_all, remove, sync_folder, write_json
from parrot_gateway.exceptions import NotFoundError, RequestTooLargeError
from parrot_gateway.settings.model import BatchSettings

#: Part of the ids of files of this gateway, but not of those of upstreams.
FILE_MARK = "file-parrot-"

Purpose: TypeAlias = Literal["batch", "batch_output"]


class StoredFile(msgspec.Struct, frozen=True):
    """One file; times are seconds of the Unix epoch."""

    id: str
    tenant: str
    filename: str
    purpose: Purpose
    num_bytes: int
    created_at: int
    expires_at: int


class Upload:
    """A file while it is written in portions; every method blocks.

    Args:
        path: for its content.
        limit_bytes: its maximum size.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.num_bytes = 0
        self._limit_bytes = limit_bytes
        self._file: BinaryIO = path.open("xb")

    def write(self, data: bytes) -> None:
        """Append a portion.

        Raises:
            RequestTooLargeError: the file exceeds the limit of the settings.
            OSError: the disk is full or fails.
        """
        self.num_bytes += len(data)
        if self.num_bytes > self._limit_bytes:
            raise RequestTooLargeError(
                f"The file is larger than {self._limit_bytes} bytes (settings "
                "batches.max_file_bytes, batches.max_total_bytes).",
                param="file",
            )
        self._file.write(data)

    def close(self) -> None:
        """Close the file; it remains until it is kept or discarded."""
        self._file.close()

    def discard(self) -> None:
        """Delete the file; does nothing once it has been kept."""
        try:
            self._file.close()
        finally:
            # Closing writes buffered bytes, which fails on a full disk.
            remove(self.path)


@dataclass(eq=False)
class FileStore:
    """The files of all tenants. Used in the event loop's thread; disk operations run in other
    threads.
    """

    folder: DataFolder
    settings: BatchSettings
    #: Seconds of the Unix epoch.
    clock: Callable[[], float]
    #: By id, oldest first.
    _files: dict[str, StoredFile] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Return the size of all contents."""
        return sum(file.num_bytes for file in self._files.values())

    def load(self) -> None:
        """Read the folder's files; blocks."""
        found = sorted(
            read_all(self.folder.files, StoredFile), key=lambda file: (file.created_at, file.id)
        )
        self._files = {file.id: file for file in found}
        for path in self.folder.files.iterdir():
            if path.name.removesuffix(".json") not in self._files:
                remove(path)

    def path(self, file: StoredFile) -> Path:
        """Return the path of its content."""
        return self.folder.files / file.id

    async def begin_upload(self) -> Upload:
        """Begin a new file.

        Raises:
            RequestTooLargeError: there are too many files.
        """
        settings = self.settings
        room = settings.max_total_bytes - self.num_bytes
        if len(self._files) >= settings.max_files or room <= 0:
            raise RequestTooLargeError(
                f"{len(self._files)} files of {self.num_bytes} bytes are kept here, which is the "
                "limit (settings batches.max_files, batches.max_total_bytes). Delete some.",
                code="storage_full",
            )
        limit = min(settings.max_file_bytes, room)
        return await asyncio.to_thread(Upload, self.folder.new_upload(), limit)

    async def keep(
        self,
        content: Path,
        tenant: str,
        filename: str,
        purpose: Purpose,
        *,
        lifetime_s: int | None = None,
        file_id: str | None = None,
    ) -> StoredFile:
        """Make a file from written content.

        Args:
            content: path on the same disk; it is moved.
            lifetime_s: seconds until its deletion; None for the settings'.
            file_id: its id; None makes one.
        """
        now = int(self.clock())
        num_bytes = (await asyncio.to_thread(content.stat)).st_size
        lifetime_s = int(self.settings.file_ttl_s) if lifetime_s is None else lifetime_s
        file = StoredFile(
            file_id or new_file_id(), tenant, filename, purpose, num_bytes, now, now + lifetime_s
        )
        await asyncio.to_thread(self._write, file, content)
        self._files[file.id] = file
        return file

    def _write(self, file: StoredFile, content: Path) -> None:
        content.replace(self.path(file))
        sync_folder(self.folder.files)
        write_json(self._json_path(file), file)

    def find(self, tenant: str, file_id: str, param: str = "id") -> StoredFile:
        """Return a tenant's file.

        Args:
            param: the request's field with the id.

        Raises:
            NotFoundError: it is unknown, deleted, expired or another tenant's.
        """
        file = self._files.get(file_id)
        if file is None or file.tenant != tenant or file.expires_at <= self.clock():
            raise NotFoundError(f"No such File object: {file_id[:80]}", param=param)
        return file

    def find_for_batch(self, tenant: str, file_id: str) -> StoredFile:
        """Return the input file of a batch that has begun, even if it has expired since."""
        file = self._files.get(file_id)
        if file is None or file.tenant != tenant:
            raise NotFoundError(f"No such File object: {file_id[:80]}", param="input_file_id")
        return file

    def newest_first(self, tenant: str) -> list[StoredFile]:
        now = self.clock()
        return [
            file
            for file in reversed(self._files.values())
            if file.tenant == tenant and file.expires_at > now
        ]

    async def delete(self, file: StoredFile) -> None:
        """Delete a file that nothing needs."""
        await self._forget([file])

    async def remove_expired(self, needed: Container[str]) -> None:
        """Delete expired files except those with an id in `needed`."""
        now = self.clock()
        files = self._files.values()
        await self._forget([f for f in files if f.expires_at <= now and f.id not in needed])

    async def _forget(self, files: Iterable[StoredFile]) -> None:
        for file in files:
            if self._files.pop(file.id, None) is not None:
                # The description goes first: the next start removes a content without one.
                await asyncio.to_thread(remove, self._json_path(file), self.path(file))

    def _json_path(self, file: StoredFile) -> Path:
        return self.folder.files / f"{file.id}.json"


def new_file_id() -> str:
    return FILE_MARK + secrets.token_hex(12)
