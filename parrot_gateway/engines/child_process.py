"""Programs that the gateway starts: their environment, and their end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

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


def send_signal(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        child.send_signal(number)
    except ProcessLookupError:
        logger.debug("process %d had ended already", child.pid)


async def end(child: asyncio.subprocess.Process, timeout_s: float) -> None:
    """End a process if it still runs: politely, then not."""
    if child.returncode is not None:
        return
    send_signal(child, signal.SIGTERM)
    try:
        async with asyncio.timeout(timeout_s):
            await child.wait()
    except TimeoutError:
        send_signal(child, signal.SIGKILL)
        await child.wait()
