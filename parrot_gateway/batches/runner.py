"""Runs one batch from any state to its end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from parrot_gateway.batches.batch import Batch
from parrot_gateway.batches.files import FileStore, new_file_id
from parrot_gateway.batches.folder import DataFolder, remove
from parrot_gateway.batches.journal import Journal
from parrot_gateway.batches.lines import (
    BatchLine,
    LineAnswer,
    LineError,
    LineUsage,
    answer_line,
    parse_line,
    raw_lines,
    unanswered_line,
    validate,
)
from parrot_gateway.batches.slots import LineSlots, Server
from parrot_gateway.exceptions import GatewayError, ModelNotFoundError, NotFoundError
from parrot_gateway.routing.model_directory import ModelDirectory
from parrot_gateway.settings.model import BatchSettings

logger = logging.getLogger(__name__)

#: Statuses of a full server or a loading model: the line is tried again until its batch expires.
_BUSY = (429, 503)
#: Statuses of a server that broke off, and the maximum tries.
_BROKEN = (408, 502, 504)
_MAX_TRIES = 3
#: Seconds between tries: the first, doubled each time up to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
#: Maximum requests read ahead, and their bytes.
_PORTION_LINES, _PORTION_BYTES = 32, 1024 * 1024

_UNANSWERED = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "This request was not executed, as its batch was cancelled."),
}


class LineRequest(NamedTuple):
    """One request of a batch, to be answered."""

    tenant: str
    batch_id: str
    #: Path of its route.
    url: str
    #: JSON.
    body: bytes


class AnswerLine(Protocol):
    """Answers one request; failures become answers, too."""

    async def __call__(self, call: LineRequest) -> LineAnswer: ...


class Tools(NamedTuple):
    """Parts that all batches of a gateway share."""

    settings: BatchSettings
    folder: DataFolder
    files: FileStore
    models: ModelDirectory
    slots: LineSlots
    answer: AnswerLine
    clock: Callable[[], float]
    #: Writes a batch to disk.
    save: Callable[[Batch], Awaitable[None]]


@dataclass(eq=False)
class BatchRun:
    """A running batch."""

    #: Unfinished; changed here, and by a cancellation in the event loop's thread.
    batch: Batch
    tools: Tools
    _journal: Journal | None = field(default=None, init=False)
    _cancelled: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def counts(self) -> tuple[int, int, LineUsage]:
        """Return the number of lines answered with a 2xx, that of other finished lines, and the
        tokens of all.
        """
        journal = self._journal
        if journal is None:
            return self.batch.completed, self.batch.failed, self.batch.usage
        return journal.completed, journal.failed, journal.usage

    def cancel(self) -> None:
        """Stop the calls of the batch after it has become `cancelling`."""
        self._cancelled.set()

    async def run(self) -> None:
        """Run to the end. If this task is cancelled, the next process continues the batch."""
        batch = self.batch
        try:
            if batch.status == "validating":
                await self._validate()
            if batch.status == "in_progress":
                await self._answer_lines()
            if batch.status in ("finalizing", "cancelling"):
                await self._finish()
        except asyncio.CancelledError:
            if self._journal is not None:
                await asyncio.to_thread(self._journal.close)
            raise
        except NotFoundError:
            await self._fail("The input file is not there any more.")
        except Exception:
            logger.exception("batch %s cannot go on", batch.id)
            await self._fail("This batch cannot go on; the operator's log has the reason.")

    async def _fail(self, message: str) -> None:
        batch, tools = self.batch, self.tools
        batch.errors = [LineError("internal_error", message)]
        batch.completed, batch.failed, batch.usage = self.counts()
        batch.become("failed", tools.clock())
        with suppress(OSError):
            await tools.save(batch)

    def _input(self) -> Path:
        files = self.tools.files
        return files.path(files.find_for_batch(self.batch.tenant, self.batch.input_file_id))

    # -- validating --------------------------------------------------------------------------------

    async def _validate(self) -> None:
        batch, tools, settings = self.batch, self.tools, self.tools.settings
        path = self._input()

        def read() -> tuple[int, list[LineError], dict[str, int]]:
            with path.open("rb") as file:
                return validate(
                    file,
                    batch.endpoint,
                    max_lines=settings.max_lines,
                    max_line_bytes=settings.max_line_bytes,
                )

        total, errors, models = await asyncio.to_thread(read)
        for model, number in models.items():
            error = self._fault_of(model)
            if error is not None:
                errors.append(LineError("model_not_found", error, "body.model", number))
        if batch.status != "validating":
            return
        batch.total, batch.model = total, next(iter(models), None)
        if errors:
            batch.errors = sorted(errors, key=lambda error: error.line or 0)
            batch.become("failed", tools.clock())
        else:
            batch.become("in_progress", tools.clock())
        await tools.save(batch)

    def _fault_of(self, model: str) -> str | None:
        try:
            self.tools.models.resolve(model)
        except ModelNotFoundError as error:
            return error.message
        except GatewayError:
            # The model may be available later.
            return None
        return None

    # -- in progress -------------------------------------------------------------------------------

    async def _answer_lines(self) -> None:
        batch, tools = self.batch, self.tools
        journal = await self._open_journal()
        work = asyncio.create_task(self._work(journal), name=f"lines-{batch.id}")
        cancelled = asyncio.create_task(self._cancelled.wait())
        try:
            await asyncio.wait(
                (work, cancelled),
                timeout=max(0.0, batch.expires_at - tools.clock()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            is_late = not work.done()
        finally:
            cancelled.cancel()
            work.cancel()
            (result,) = await asyncio.gather(work, return_exceptions=True)
        if isinstance(result, BaseExceptionGroup):
            raise result.exceptions[0]
        if isinstance(result, Exception):
            raise result
        if batch.status == "in_progress":
            batch.is_late = is_late
            batch.become("finalizing", tools.clock())
            await tools.save(batch)

    async def _open_journal(self) -> Journal:
        if self._journal is None:
            folder = self.tools.folder.batches
            output, errors = (folder / f"{self.batch.id}.{kind}" for kind in ("output", "errors"))
            self._journal = await asyncio.to_thread(Journal, output, errors)
        return self._journal

    async def _work(self, journal: Journal) -> None:
        slots = self.tools.slots
        reader = await asyncio.to_thread(self._requests, journal)
        try:
            async with asyncio.TaskGroup() as group:
                while lines := await asyncio.to_thread(reader.portion):
                    for line in lines:
                        server = await slots.acquire(line.model)
                        task = group.create_task(self._answer(line, journal))
                        task.add_done_callback(partial(_release, slots, server))
        finally:
            reader.close()

    def _requests(self, journal: Journal) -> _Requests:
        return _Requests(self._input(), self.batch, self.tools.settings, journal.done)

    async def _answer(self, line: BatchLine, journal: Journal) -> None:
        batch, tries = self.batch, 0
        call = LineRequest(batch.tenant, batch.id, batch.endpoint, line.body)
        while True:
            answer = await self.tools.answer(call)
            tries += 1
            is_busy = answer.status in _BUSY
            if not is_busy and (answer.status not in _BROKEN or tries >= _MAX_TRIES):
                break
            pause_s = min(_FIRST_PAUSE_S * 2 ** min(tries - 1, 10), _LONGEST_PAUSE_S)
            await asyncio.sleep(max(pause_s, min(answer.retry_after_s or 0.0, _LONGEST_PAUSE_S)))
        written = answer_line(batch.id, line, answer)
        succeeded = answer.status < 300
        await asyncio.to_thread(journal.add, line.number, written, succeeded=succeeded)

    # -- finalizing, cancelling --------------------------------------------------------------------

    async def _finish(self) -> None:
        batch, tools = self.batch, self.tools
        journal = await self._open_journal()
        if batch.status == "cancelling" or batch.is_late:
            code, message = _UNANSWERED["expired" if batch.is_late else "cancelled"]
            await asyncio.to_thread(self._write_unanswered, journal, code, message)
        await asyncio.to_thread(journal.close)
        batch.completed, batch.failed, batch.usage = self.counts()
        if journal.completed:
            batch.output_file_id = batch.output_file_id or new_file_id()
        if journal.failed:
            batch.error_file_id = batch.error_file_id or new_file_id()
        await tools.save(batch)
        await self._keep(journal.output, batch.output_file_id, "output")
        await self._keep(journal.errors, batch.error_file_id, "errors")
        if batch.status == "cancelling":
            batch.become("cancelled", tools.clock())
        else:
            batch.become("expired" if batch.is_late else "completed", tools.clock())
        await tools.save(batch)
        await asyncio.to_thread(remove, journal.output, journal.errors)
        self._journal = None

    def _write_unanswered(self, journal: Journal, code: str, message: str) -> None:
        if not self.batch.total:
            # The batch was cancelled before its validation.
            return
        reader = self._requests(journal)
        try:
            while lines := reader.portion():
                for line in lines:
                    written = unanswered_line(self.batch.id, line, code, message)
                    journal.add(line.number, written, succeeded=False)
        finally:
            reader.close()

    async def _keep(self, path: Path, file_id: str | None, kind: str) -> None:
        """Make one of the journal's files a file of the client; the journal remains until the batch
        has ended.
        """
        if file_id is None:
            return
        tools, batch = self.tools, self.batch

        def link() -> Path:
            linked = tools.folder.new_upload()
            os.link(path, linked)
            return linked

        await tools.files.keep(
            await asyncio.to_thread(link),
            batch.tenant,
            f"{batch.id}_{kind}.jsonl",
            "batch_output",
            lifetime_s=batch.output_lifetime_s,
            file_id=file_id,
        )


def _release(slots: LineSlots, server: Server, _: asyncio.Task[None]) -> None:
    slots.release(server)


class _Requests:
    """Reads the unanswered requests of a batch in portions; blocks."""

    def __init__(self, path: Path, batch: Batch, settings: BatchSettings, done: set[int]) -> None:
        self._file = path.open("rb")
        self._lines = raw_lines(self._file, settings.max_line_bytes)
        self._batch = batch
        self._done = done

    def portion(self) -> list[BatchLine]:
        """Return the next requests; empty at the end."""
        found: list[BatchLine] = []
        num_bytes = 0
        for number, raw in self._lines:
            if number in self._done:
                continue
            line = parse_line(raw, number, self._batch.endpoint)
            if isinstance(line, BatchLine):
                found.append(line)
                num_bytes += len(raw)
            if len(found) >= _PORTION_LINES or num_bytes >= _PORTION_BYTES:
                break
        return found

    def close(self) -> None:
        self._file.close()
