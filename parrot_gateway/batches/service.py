"""The files and batches of a gateway, and their lifetime."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import msgspec

from parrot_gateway.batches.batch import WINDOW_S, Batch, new_batch_id
from parrot_gateway.batches.files import FileStore, StoredFile
from parrot_gateway.batches.folder import DataFolder, FolderInUseError, read_all, remove, write_json
from parrot_gateway.batches.lines import LineUsage
from parrot_gateway.batches.runner import AnswerLine, BatchRun, Tools
from parrot_gateway.batches.slots import LineSlots
from parrot_gateway.exceptions import ConflictError, NotFoundError, OverloadedError
from parrot_gateway.routing.model_directory import ModelDirectory
from parrot_gateway.settings.model import BatchSettings

logger = logging.getLogger(__name__)

#: Seconds between searches for expired files and batches.
SWEEP_S = 60.0


@dataclass(eq=False)
class BatchService:
    """All files and batches. The folder is opened at the start if it exists, otherwise on first
    use. Used in the event loop's thread.
    """

    #: Limits, and the path of the folder.
    settings: BatchSettings
    models: ModelDirectory
    _: KW_ONLY
    #: Seconds of the Unix epoch.
    clock: Callable[[], float]
    #: Called with the id of each batch that has ended.
    on_ended: Callable[[str], None]

    def __post_init__(self) -> None:
        #: None until the folder is open; until then there are no files and batches.
        self.files: FileStore | None = None
        self._slots = LineSlots(self.models, self.settings.max_running_lines)
        #: By id, oldest first.
        self._batches: dict[str, Batch] = {}
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._answer: AnswerLine | None = None
        self._folder: DataFolder | None = None
        self._opening = asyncio.Lock()
        self._saving = asyncio.Lock()

    async def start(self, answer: AnswerLine) -> None:
        """Continue the batches of the previous process.

        Args:
            answer: answers the lines of batches.
        """
        self._answer = answer
        if await asyncio.to_thread(self.settings.data_folder.is_dir):
            # An unusable folder has been logged.
            with suppress(OverloadedError):
                await self.open()

    async def open(self) -> FileStore:
        """Return the files, after opening the folder if necessary.

        Raises:
            OverloadedError: the folder cannot be used, or another process uses it.
        """
        async with self._opening:
            if self.files is None:
                self.files = await self._open()
                self._begin(self._sweep(self.files))
                for batch in self._batches.values():
                    if not batch.has_ended:
                        self._run(batch)
            return self.files

    async def _open(self) -> FileStore:
        if self._answer is None:
            raise OverloadedError("The gateway is shutting down.", code="shutting_down")
        path = self.settings.data_folder
        try:
            self._folder = await asyncio.to_thread(DataFolder, path)
            files = FileStore(self._folder, self.settings, self.clock)
            await asyncio.to_thread(files.load)
            found = await asyncio.to_thread(list, read_all(self._folder.batches, Batch))
        except (OSError, FolderInUseError, msgspec.DecodeError) as error:
            self._release()
            logger.error(
                "no files and batches: their folder (batches.folder) cannot be used: %s", error
            )
            raise OverloadedError(
                "The folder of files and batches cannot be used by this gateway; the operator's "
                "log has the reason (setting batches.folder).",
                code="storage_unavailable",
                retry_after_s=60.0,
            ) from None
        found.sort(key=lambda batch: (batch.created_at, batch.id))
        self._batches = {batch.id: batch for batch in found}
        return files

    async def close(self) -> None:
        """Stop all batches, which the next process continues, and release the folder."""
        self._answer = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self._saving:
            self._release()

    def _release(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def describe(self) -> dict[str, Any]:
        """Return counts for `/health`."""
        return {
            "files": 0 if self.files is None else len(self.files),
            "file_bytes": 0 if self.files is None else self.files.num_bytes,
            "batches": len(self._batches),
            "running_batches": len(self._runs),
            "running_lines": self._slots.held(),
        }

    # -- batches -----------------------------------------------------------------------------------

    async def create(
        self,
        file: StoredFile,
        endpoint: str,
        *,
        metadata: dict[str, str] | None,
        output_lifetime_s: int | None,
    ) -> Batch:
        """Start a batch.

        Args:
            file: its input.
            endpoint: path of the route that its lines call.
            metadata: from the client.
            output_lifetime_s: lifetime of its output and error files; None for the settings'.

        Raises:
            OverloadedError: there are too many unfinished batches.
        """
        if len(self._runs) >= self.settings.max_batches:
            raise OverloadedError(
                f"{len(self._runs)} batches have not ended, which is the limit (setting "
                "batches.max_batches).",
                code="too_many_batches",
                retry_after_s=60.0,
            )
        now = int(self.clock())
        batch = Batch(
            new_batch_id(),
            file.tenant,
            endpoint,
            file.id,
            now,
            now + WINDOW_S,
            metadata=metadata,
            output_lifetime_s=output_lifetime_s,
        )
        await self._save(batch)
        self._batches[batch.id] = batch
        self._run(batch)
        return batch

    def find(self, tenant: str, batch_id: str) -> Batch:
        """Return a tenant's batch.

        Raises:
            NotFoundError: it is unknown, was removed, or is another tenant's.
        """
        batch = self._batches.get(batch_id)
        if batch is None or batch.tenant != tenant:
            raise NotFoundError(f"No batch found with id '{batch_id[:80]}'.", param="batch_id")
        return batch

    def newest_first(self, tenant: str) -> list[Batch]:
        return [batch for batch in reversed(self._batches.values()) if batch.tenant == tenant]

    def counts(self, batch: Batch) -> tuple[int, int, LineUsage]:
        """Return the number of lines answered with a 2xx, that of other finished lines, and the
        tokens of all.
        """
        run = self._runs.get(batch.id)
        return (batch.completed, batch.failed, batch.usage) if run is None else run.counts()

    async def cancel(self, batch: Batch) -> None:
        """Stop a batch; does nothing if it is being cancelled already.

        Raises:
            ConflictError: it has ended, or is about to.
        """
        if batch.status == "cancelling":
            return
        if not batch.can_become("cancelling"):
            raise ConflictError(
                f"Cannot cancel a batch with status '{batch.status}'.", param="batch_id"
            )
        batch.become("cancelling", self.clock())
        self._runs[batch.id].cancel()
        await self._save(batch)

    async def delete_file(self, file: StoredFile) -> None:
        """Delete a file.

        Raises:
            ConflictError: an unfinished batch needs it.
        """
        assert self.files is not None
        batch_id = self._needed().get(file.id)
        if batch_id is not None:
            raise ConflictError(
                f"File '{file.id}' is the input of batch '{batch_id}', which has not ended. Cancel "
                "it first.",
                param="id",
            )
        await self.files.delete(file)

    def _needed(self) -> dict[str, str]:
        """Return the unfinished batches by the file that each needs."""
        unfinished = (run.batch for run in self._runs.values() if not run.batch.has_ended)
        return {batch.input_file_id: batch.id for batch in unfinished}

    def _run(self, batch: Batch) -> None:
        assert self._folder is not None
        assert self.files is not None
        assert self._answer is not None
        tools = Tools(
            self.settings,
            self._folder,
            self.files,
            self.models,
            self._slots,
            self._answer,
            self.clock,
            self._save,
        )
        run = self._runs[batch.id] = BatchRun(batch, tools)
        self._begin(self._finish(run))

    async def _finish(self, run: BatchRun) -> None:
        try:
            await run.run()
        finally:
            del self._runs[run.batch.id]
            self.on_ended(run.batch.id)

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _save(self, batch: Batch) -> None:
        async with self._saving:
            if self._folder is None:
                return
            path = self._path(self._folder, batch)
            writing = asyncio.ensure_future(asyncio.to_thread(write_json, path, batch))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                # Keep the folder until the thread has finished.
                await asyncio.wait((writing,))
                raise

    def _path(self, folder: DataFolder, batch: Batch) -> Path:
        return folder.batches / f"{batch.id}.json"

    async def _sweep(self, files: FileStore) -> None:
        while True:
            try:
                await files.remove_expired(self._needed())
                await self._remove_old()
            except OSError:
                logger.exception("what has expired could not be removed")
            await asyncio.sleep(SWEEP_S)

    async def _remove_old(self) -> None:
        """Forget batches that ended longer ago than a file is kept, and the oldest beyond the
        limit.
        """
        now, ended = self.clock(), [each for each in self._batches.values() if each.has_ended]
        surplus = len(ended) - self.settings.max_files
        for number, batch in enumerate(ended):
            if number < surplus or batch.ended_at + self.settings.file_ttl_s <= now:
                del self._batches[batch.id]
                assert self._folder is not None
                path = self._path(self._folder, batch)
                # A failed batch has left its answers.
                left = (path.with_suffix(".output"), path.with_suffix(".errors"))
                await asyncio.to_thread(remove, path, *left)
