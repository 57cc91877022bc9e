"""Files of clients: what is known of them in memory, their contents on disk.

Each belongs to one tenant, for whom those of others do not exist. Number, size and age are bounded.
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

#: In the ids of files of this gateway, which an upstream's do not have.
FILE_MARK = "file-parrot-"

Purpose: TypeAlias = Literal["batch", "batch_output"]


class StoredFile(msgspec.Struct, frozen=True):
    """A file; times are seconds of the Unix epoch."""

    id: str
    tenant: str
    filename: str
    purpose: Purpose
    num_bytes: int
    created_at: int
    expires_at: int


class Upload:
    """A file that is being written, in portions; every method blocks.

    Args:
        path: of its content.
        limit_bytes: how much it may come to.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.num_bytes = 0
        self._limit_bytes = limit_bytes
        self._file: BinaryIO = path.open("xb")

    def write(self, data: bytes) -> None:
        """Append a portion.

        Raises:
            RequestTooLargeError: the file is over the limit of the settings.
            OSError: the disk takes no more.
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
        """Close the file; it stays until it is kept or discarded."""
        self._file.close()

    def discard(self) -> None:
        """Give it up. Safe after it was kept."""
        try:
            self._file.close()
        finally:
            # Closing writes what is buffered, for which a full disk has no room.
            remove(self.path)


@dataclass(eq=False)
class FileStore:
    """The files of all tenants. Used in the event loop's thread; waits for the disk in threads."""

    folder: DataFolder
    settings: BatchSettings
    #: Seconds of the Unix epoch.
    clock: Callable[[], float]
    #: Oldest first.
    _files: dict[str, StoredFile] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """The size of all contents."""
        return sum(file.num_bytes for file in self._files.values())

    def load(self) -> None:
        """Read what the folder holds; blocks."""
        found = sorted(
            read_all(self.folder.files, StoredFile), key=lambda file: (file.created_at, file.id)
        )
        self._files = {file.id: file for file in found}
        for path in self.folder.files.iterdir():
            if path.name.removesuffix(".json") not in self._files:
                remove(path)

    def path(self, file: StoredFile) -> Path:
        """Where its content is."""
        return self.folder.files / file.id

    async def begin_upload(self) -> Upload:
        """Begin a new file.

        Raises:
            RequestTooLargeError: there are too many already.
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
        """Make what was written a file.

        Args:
            content: on the same disk; moves.
            lifetime_s: after which it is deleted; the settings' when not given.
            file_id: where it is known before.
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
        """A tenant's file.

        Args:
            param: where its id was given.

        Raises:
            NotFoundError: it is unknown, deleted, expired or another tenant's.
        """
        file = self._files.get(file_id)
        if file is None or file.tenant != tenant or file.expires_at <= self.clock():
            raise NotFoundError(f"No such File object: {file_id[:80]}", param=param)
        return file

    def find_for_batch(self, tenant: str, file_id: str) -> StoredFile:
        """The same for a batch that has begun, whose file may have expired since."""
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
        """Delete a file; nothing may need it any more."""
        await self._forget([file])

    async def remove_expired(self, needed: Container[str]) -> None:
        """Delete files that are too old, unless their id is among those needed."""
        now = self.clock()
        files = self._files.values()
        await self._forget([f for f in files if f.expires_at <= now and f.id not in needed])

    async def _forget(self, files: Iterable[StoredFile]) -> None:
        for file in files:
            if self._files.pop(file.id, None) is not None:
                # The description first: a content without one is removed at the next start.
                await asyncio.to_thread(remove, self._json_path(file), self.path(file))

    def _json_path(self, file: StoredFile) -> Path:
        return self.folder.files / f"{file.id}.json"


def new_file_id() -> str:
    return FILE_MARK + secrets.token_hex(12)
