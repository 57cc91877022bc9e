"""The engine as a program: load one model, then join a gateway or serve on its own.

    python -m parrot_engine --model Qwen/Qwen3-0.6B --join ws://host:8000/v1/engines/join
    python -m parrot_engine --model parrot-demo --listen 127.0.0.1:8100

Keys come from the environment, never from the command line: `PARROT_JOIN_KEY` to join,
`PARROT_ENGINE_KEY` for the callers of an engine that listens. Progress
and errors go to standard error; the last line of a failure names the remedy.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

from parrot_engine.engine.driver import DriverStoppedError, EngineDriver
from parrot_engine.exceptions import ParrotEngineError, SettingsError
from parrot_engine.loading.factory import (
    EngineOptions,
    LoadedEngine,
    add_engine_flags,
    given_options,
    load_engine,
)
from parrot_engine.progress import print_line
from parrot_engine.runner.torch_import import import_torch

_log = logging.getLogger(__name__)

JOIN_KEY_VARIABLE = "PARROT_JOIN_KEY"
ENGINE_KEY_VARIABLE = "PARROT_ENGINE_KEY"

#: Exit status when another try with the same options is pointless (sysexits' EX_CONFIG).
EXIT_CONFIG = 78
#: Exit status after the engine broke down.
EXIT_CRASH = 70

#: Packages of the extra `engine`.
_PACKAGES = frozenset({"torch", "transformers", "safetensors", "llguidance"})

#: How long an orderly end may take once the parent process is gone.
_ORPHAN_GRACE_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(
        level=parsed.log_level.upper(), format="%(levelname)s %(message)s", stream=sys.stderr
    )
    if parsed.with_parent:
        threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    try:
        options = _options(parsed)
        if parsed.join is not None:
            _check_join(parsed.join)
        # Before the model is loaded, which may take minutes.
        listener = None if parsed.listen is None else _bind(*_listen_address(parsed.listen))
        loaded = _load(options)
        if listener is not None:
            return _run_listening(loaded, listener)
        return asyncio.run(
            run_joined(loaded, parsed.join, parsed.engine_name, options.adapter_folders or ())
        )
    except ParrotEngineError as error:
        print_line(f"error: {error}")
        return EXIT_CONFIG
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        print_line(
            f"error: {error.name} is not installed, which own engines need: "
            "pip install 'parrot-gateway[engine]'"
        )
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parrot-gateway engine",
        description="Run one engine: joined to a gateway, or on its own.",
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="a folder, a hub id, or parrot-demo")
    model.add_argument("--options", metavar="JSON", help="all model options as one JSON object")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--join", metavar="URL", help="a gateway's ws://HOST:PORT/v1/engines/join")
    where.add_argument("--listen", metavar="HOST:PORT", help="serve /fill, /generate, … here")
    parser.add_argument("--name", help="the model id that clients use")
    add_engine_flags(
        parser, "kind", "device", "dtype", "block_size", "num_blocks", "kv_cache_bytes",
        "kv_cache_dtype", "gpu_memory_utilization", "cuda_graphs", "speculative_tokens",
        "max_batch_size", "max_batch_tokens", "max_context_tokens", "prefix_caching", "seed",
        "num_threads", "tensor_parallel", "enable_expert_parallel", "host_memory_gb", "max_loras",
        "max_lora_rank", "deterministic", "dummy_weights", "trust_remote_code",
    )  # fmt: skip
    parser.add_argument(
        "--lora",
        type=_named_path,
        action="append",
        metavar="NAME=PATH",
        help="LoRA adapter (a PEFT folder) that is served under NAME; repeatable",
    )
    parser.add_argument(
        "--adapter-folder",
        dest="adapter_folders",
        action="append",
        metavar="PATH",
        help="folder from which the gateway may have others loaded; repeatable",
    )
    parser.add_argument("--engine-name", help="how operators see this engine (default: host:pid)")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    parser.add_argument(
        "--with-parent",
        action="store_true",
        help="end when standard input does, which is when the parent process does",
    )
    return parser


def _options(parsed: argparse.Namespace) -> EngineOptions:
    if parsed.options is not None:
        return EngineOptions.from_json(parsed.options)
    adapters = dict(parsed.lora) if parsed.lora else None
    return EngineOptions(**given_options(parsed), adapters=adapters)


def _named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=PATH")
    return name, path


def _load(options: EngineOptions) -> LoadedEngine:
    print_line(f"loading {options.model} …")
    started = time.perf_counter()
    import_torch()
    imported_s = time.perf_counter() - started
    loaded = load_engine(options)
    # What exists by now lives as long as the process. Left to the garbage collector, walking it
    # again and again stops all generations for some 20 ms.
    gc.collect()
    gc.freeze()
    info = loaded.engine.info
    print_line(
        f"{info.model}: {info.architecture} on the {info.kind} engine, {info.device}, "
        f"{info.dtype}, contexts of up to {info.max_context_tokens} tokens, ready after "
        f"{time.perf_counter() - started:.1f} s (importing torch: {imported_s:.1f} s)"
    )
    return loaded


async def run_joined(
    loaded: LoadedEngine, url: str, engine_name: str | None, adapter_folders: Sequence[str] = ()
) -> int:
    """Keep a loaded engine joined to a gateway until a signal; returns the exit status.

    Raises:
        LinkRefusedError: the gateway refuses this engine.
    """
    try:
        from parrot_engine.link.client import EngineLink
    except ImportError as error:
        print_line(f"error: joining a gateway needs {error.name}: pip install parrot-gateway")
        return EXIT_CONFIG
    loop = asyncio.get_running_loop()
    crashed = asyncio.Event()

    def on_crash(_: Exception) -> None:
        loop.call_soon_threadsafe(crashed.set)

    driver = EngineDriver(loaded.engine, on_crash=on_crash)
    link = EngineLink(
        driver,
        loaded.text,
        url=url,
        join_key=os.environ[JOIN_KEY_VARIABLE],
        name=engine_name,
        adapter_folders=adapter_folders,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, link.stop)
    driver.start()
    running = asyncio.create_task(link.run(), name="link")
    watching = asyncio.create_task(crashed.wait(), name="crash-watch")
    try:
        await asyncio.wait([running, watching], return_when=asyncio.FIRST_COMPLETED)
        if not crashed.is_set():
            running.result()
            return 0
    except DriverStoppedError:
        _log.debug("the link noticed the end of the engine first")
    finally:
        for task in (running, watching):
            task.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)
        await asyncio.to_thread(driver.close)
    print_line("error: the engine broke down; the lines above have the details")
    return EXIT_CRASH


def _check_join(url: str) -> None:
    """Check key and address before the model is loaded.

    Raises:
        SettingsError: no key in the environment, or not the address of a WebSocket.
    """
    if not os.environ.get(JOIN_KEY_VARIABLE):
        raise SettingsError("--join", f"set {JOIN_KEY_VARIABLE} to the gateway's join key")
    if not url.startswith(("ws://", "wss://")):
        raise SettingsError("--join", f"{url}: ws://HOST:PORT/v1/engines/join is wanted, or wss://")


def _listen_address(text: str) -> tuple[str, int]:
    """Host and port of `--listen`.

    Raises:
        SettingsError: not HOST:PORT, or an address of the network while there is no key.
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdigit() or int(port) > 65535:
        raise SettingsError("--listen", f"{text}: HOST:PORT is wanted")
    if not _is_loopback(host) and not os.environ.get(ENGINE_KEY_VARIABLE):
        raise SettingsError(
            "--listen",
            f"anybody on the network could use {host}: set {ENGINE_KEY_VARIABLE} to the key that "
            "callers must send",
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int) -> socket.socket:
    """A socket at an address; port 0 takes a free one.

    Raises:
        SettingsError: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            "--listen",
            f"cannot listen on {host}:{port}: {error.strerror or error}. Is it an address of this "
            "machine, and a port that no other program has?",
        ) from None
    return listener


def _run_listening(loaded: LoadedEngine, listener: socket.socket) -> int:
    try:
        from parrot_engine.server.app import run_server
    except ImportError as error:
        print_line(f"error: serving needs {error.name}: pip install parrot-gateway")
        return EXIT_CONFIG
    key = os.environ.get(ENGINE_KEY_VARIABLE) or None
    host, port = listener.getsockname()[:2]
    print_line(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")
    return run_server(loaded.engine, loaded.text, listener=listener, key=key)


def _end_with_parent() -> None:
    """Wait for the end of standard input, a pipe that dies with the parent, and follow."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_GRACE_S)
    # No client is left for what still runs.
    os._exit(EXIT_CRASH)


if __name__ == "__main__":
    sys.exit(main())
