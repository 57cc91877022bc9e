"""Files and batches of a gateway, and their lifetime."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from parrot_gateway.batches.files import FileStore
from parrot_gateway.batches.folder import DataFolder, FolderInUseError
from parrot_gateway.exceptions import OverloadedError
from parrot_gateway.settings.model import BatchSettings

logger = logging.getLogger(__name__)

#: Seconds between two looks for what has expired.
SWEEP_S = 60.0


class BatchService:
    """Files and batches. The folder is opened at the start if it is there, else when first needed.

    Args:
        settings: bounds, and where the folder is.
        clock: seconds of the Unix epoch.
    """

    def __init__(self, settings: BatchSettings, clock: Callable[[], float]) -> None:
        self.settings = settings
        #: None until the folder is open; there is nothing of ours then.
        self.files: FileStore | None = None
        self._clock = clock
        self._folder: DataFolder | None = None
        self._opening = asyncio.Lock()
        self._sweeper: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Go on where the last process stopped."""
        if await asyncio.to_thread(self.settings.data_folder.is_dir):
            try:
                await self.open()
            except OverloadedError:
                logger.warning("files and batches are not offered by this process")

    async def open(self) -> FileStore:
        """The files, from the folder opened if need be.

        Raises:
            OverloadedError: the folder cannot be used, or by another process only.
        """
        async with self._opening:
            if self.files is None:
                if self._closed:
                    raise OverloadedError("The gateway is shutting down.", code="shutting_down")
                self.files = await self._open()
                self._sweeper = asyncio.create_task(self._sweep(), name="batches-sweep")
            return self.files

    async def _open(self) -> FileStore:
        path = self.settings.data_folder
        try:
            self._folder = await asyncio.to_thread(DataFolder, path)
            files = FileStore(self._folder, self.settings, self._clock)
            await asyncio.to_thread(files.load)
        except (OSError, FolderInUseError, msgspec.DecodeError) as error:
            self._release()
            logger.error("the folder of files and batches cannot be used: %s", error)
            raise OverloadedError(
                "The folder of files and batches cannot be used by this gateway; the operator's "
                "log has the reason (setting batches.folder).",
                code="storage_unavailable",
                retry_after_s=60.0,
            ) from None
        return files

    async def close(self) -> None:
        """Stop, and let another process have the folder."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        self._release()

    def _release(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    async def _sweep(self) -> None:
        while True:
            try:
                assert self.files is not None
                await self.files.remove_expired(frozenset())
            except OSError:
                logger.exception("expired files could not be removed")
            await asyncio.sleep(SWEEP_S)
