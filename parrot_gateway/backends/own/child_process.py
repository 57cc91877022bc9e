"""Programs that the gateway starts: their environment, and their end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

logger = logging.getLogger(__name__)

# NOTE: an engine may run code that came with a checkpoint: of the environment it gets what finds
# Python, devices, caches and the hub, and none of the gateway's or the operator's keys.
#: Variables that are passed on.
_NAMES = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV",
     "LD_LIBRARY_PATH", "LD_PRELOAD", "XDG_CACHE_HOME", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}
)  # fmt: skip

#: Families of variables that are passed on.
_PREFIXES = (
    "LC_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH", "PYTORCH_", "TRITON_",
    "CUDA_", "NVIDIA_", "NCCL_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "SSL_", "PYTHON",
)  # fmt: skip

_MAX_LINE_BYTES = 16 * 1024
#: For the output of a process that has ended.
_READ_TIMEOUT_S = 1.0
#: Read at once of output that nobody wants.
_DROPPED_BYTES = 64 * 1024

#: Proxies, in either case.
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})


def engine_environment() -> dict[str, str]:
    """The variables of this process that an engine process gets."""
    return {
        name: text
        for name, text in os.environ.items()
        if not name.upper().endswith("_API_KEY")
        and (name in _NAMES or name.lower() in _PROXIES or name.startswith(_PREFIXES))
    }


async def start(
    command: Sequence[str], environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    """Start an engine process, which is to end when its standard input does.

    Its standard error is to be read, in lines of at most 16 KB.

    Raises:
        OSError: it cannot be started.
    """
    return await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        # The process ends when this pipe does, however this process may end.
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
        # A Ctrl-C in the terminal is for the gateway, which drains first.
        start_new_session=True,
    )


def send_signal(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        child.send_signal(number)
    except ProcessLookupError:
        logger.debug("process %d had ended already", child.pid)


async def end(
    child: asyncio.subprocess.Process,
    timeout_s: float,
    *,
    ask: Callable[[], None] | None = None,
    reader: asyncio.Task[None] | None = None,
) -> None:
    """End a process if it still runs, and close its transport in any case.

    Output that nobody reads any more is dropped: asyncio reports an exit only after it has seen the
    end of the output, and stops reading once 128 KiB are waiting.

    Args:
        child: the process.
        timeout_s: seconds until it is killed, and until the wait for a killed one is given up.
        ask: asks it to end; SIGTERM if not given.
        reader: reads its output, and gets a second for the rest of it before it is cancelled.
    """
    readers = [reader] if reader is not None else []
    if reader is None:
        streams = (stream for stream in (child.stdout, child.stderr) if stream is not None)
        readers = [asyncio.create_task(_drop(stream)) for stream in streams]
    try:
        if child.returncode is None:
            (ask or partial(send_signal, child, signal.SIGTERM))()
            if not await _has_ended(child, timeout_s):
                send_signal(child, signal.SIGKILL)
                if not await _has_ended(child, timeout_s):
                    logger.warning("process %d does not end", child.pid)
        if reader is not None:
            # A grandchild may hold the pipe open.
            await asyncio.wait([reader], timeout=_READ_TIMEOUT_S)
    finally:
        # NOTE: asyncio has no public way to the transport. One that is left open warns from its
        # destructor, possibly after its event loop has ended.
        child._transport.close()  # type: ignore[attr-defined]
        for each in readers:
            each.cancel()


async def _has_ended(child: asyncio.subprocess.Process, timeout_s: float) -> bool:
    """Wait for the end of a process and of its output; return False after the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            await child.wait()
    except TimeoutError:
        return False
    return True


async def _drop(stream: asyncio.StreamReader) -> None:
    """Read a stream to its end, unless somebody else reads it."""
    with suppress(RuntimeError):
        while await stream.read(_DROPPED_BYTES):
            pass
