"""Downloads of hub repositories, each in a process of its own that reports its progress.

The program is `parrot_engine.loading.pull`; what it leaves behind when it is killed is taken up by
the next one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from parrot_gateway.backends.own.changes import Changes
from parrot_gateway.backends.own.child_process import end, engine_environment
from parrot_gateway.exceptions import download_error
from parrot_gateway.settings.model import EngineLinkSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")
DownloadState: TypeAlias = Literal["waiting", "downloading", "done", "failed", "cancelled"]

#: Downloads that have ended and are still shown.
_KEPT = 32
#: Downloads that run or wait.
_MAX_UNFINISHED = 64
_STOP_TIMEOUT_S = 3.0


class _Line(msgspec.Struct):
    """A line that the program writes; which fields there are is its docstring's affair."""

    total_bytes: int | None = None
    files: int | None = None
    done_bytes: int | None = None
    path: str | None = None
    failure: str | None = None
    message: str | None = None


_line_decoder = msgspec.json.Decoder(_Line)


@dataclass(eq=False)
class Download:
    """One repository on its way here."""

    model: str
    state: DownloadState = "waiting"
    done_bytes: int = 0
    total_bytes: int | None = None
    files: int | None = None
    #: The folder, once it is done.
    path: str | None = None
    #: Why it failed: a code, and in words.
    failure: str | None = None
    reason: str | None = None
    since: float = field(default_factory=time.time)
    changes: Changes = field(default_factory=Changes, repr=False)

    @property
    def has_ended(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    def update(self, **fields: Any) -> None:
        """Set fields, and wake those who wait for a change."""
        for name, value in fields.items():
            setattr(self, name, value)
        self.changes.notify()

    async def ended(self) -> None:
        """Return once it is here.

        Raises:
            GatewayError: it failed or was cancelled.
        """
        while not self.has_ended:
            await self.changes.next().wait()
        if self.state != "done":
            raise download_error(self.failure or "", self.reason or "")

    def describe(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "state": self.state,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
            "files": self.files,
            "path": self.path,
            "code": self.failure,
            "reason": self.reason,
            "since": int(self.since),
        }


def pull_command(model: str, max_bytes: int) -> list[str]:
    """The command line of a download."""
    return [
        *(sys.executable, "-m", "parrot_engine.loading.pull", model),
        *("--max-bytes", str(max_bytes)),
    ]


class Downloads:
    """Runs downloads, a few at a time; the rest wait.

    Args:
        max_running: at once.
        max_bytes: what the files of one model may come to.
        stall_s: one of which no byte comes for so long has failed.
        command: makes the command line from model and `max_bytes`.
    """

    def __init__(
        self,
        max_running: int,
        max_bytes: int,
        stall_s: float = EngineLinkSettings().download_stall_s,
        *,
        command: Callable[[str, int], list[str]] = pull_command,
    ) -> None:
        #: By repository: those that run or wait, and the last ones that ended.
        self.all: dict[str, Download] = {}
        #: Of all of them.
        self.changes = Changes()
        self._stall_s = stall_s
        self._running = asyncio.Semaphore(max_running)
        self._max_bytes = max_bytes
        self._command = command
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def is_full(self) -> bool:
        """Return whether too many run or wait for another to begin."""
        return len(self._tasks) >= _MAX_UNFINISHED

    def start(self, model: str) -> Download:
        """Download a repository; the download that runs already, if there is one."""
        known = self.all.get(model)
        if known is not None and not known.has_ended:
            return known
        ended = [name for name, each in self.all.items() if each.has_ended]
        for name in ended[: max(0, len(ended) - _KEPT + 1)]:
            del self.all[name]
        self.all.pop(model, None)
        download = self.all[model] = Download(model, changes=self.changes)
        task = self._tasks[model] = asyncio.create_task(self._run(download), name=f"pull-{model}")
        task.add_done_callback(lambda _: self._tasks.pop(model, None))
        return download

    async def cancel(self, model: str) -> bool:
        """End a download; False where there is none under way. Whole files stay."""
        task = self._tasks.get(model)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait({task})
        return True

    async def close(self) -> None:
        """End all downloads."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, download: Download) -> None:
        try:
            async with self._running:
                download.update(state="downloading")
                await self._pull(download)
        except asyncio.CancelledError:
            download.update(
                state="cancelled",
                failure="download_cancelled",
                reason=f"The download of {download.model} was cancelled; whole files are kept.",
            )
            raise
        except OSError as error:
            self._fail(download, "download_failed", f"it could not be started: {error}")
        except Exception:
            logger.exception("the download of %s failed", download.model)
            self._fail(download, "download_failed", "the gateway failed; its log has the details")

    async def _pull(self, download: Download) -> None:
        child = await asyncio.create_subprocess_exec(
            *self._command(download.model, self._max_bytes),
            env=engine_environment(),
            # It ends when this pipe does, however this process may end.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            assert child.stdout is not None
            # A line comes with every byte, or nearly.
            while raw := await self._in_time(child.stdout.readline()):
                self._read(download, raw)
            status = await self._in_time(child.wait())
        except TimeoutError:
            self._fail(
                download,
                "download_stalled",
                f"no byte came for {self._stall_s:g} s (setting engines.download_stall_s); what is "
                "whole is kept, and another try goes on from there",
            )
            return
        finally:
            await end(child, _STOP_TIMEOUT_S)
        if not download.has_ended:
            self._fail(download, "download_failed", f"its process ended with status {status}")

    async def _in_time(self, wait: Awaitable[T]) -> T:
        async with asyncio.timeout(self._stall_s):
            return await wait

    def _read(self, download: Download, raw: bytes) -> None:
        line = _line_decoder.decode(raw)
        if line.failure is not None:
            self._fail(download, line.failure, line.message or line.failure)
        elif line.path is not None:
            logger.info("%s was downloaded to %s", download.model, line.path)
            download.update(state="done", path=line.path)
        else:
            known = {"total_bytes": line.total_bytes, "files": line.files}
            fields = {name: value for name, value in known.items() if value is not None}
            download.update(done_bytes=line.done_bytes or 0, **fields)

    def _fail(self, download: Download, failure: str, reason: str) -> None:
        logger.warning("%s was not downloaded: %s", download.model, reason)
        download.update(state="failed", failure=failure, reason=reason)
