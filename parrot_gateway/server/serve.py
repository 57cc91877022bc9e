"""Runs the application in one uvicorn server that drains instead of dropping.

The first Ctrl-C (or SIGTERM) refuses new calls with a 503 and waits for running ones, the second
ends at once.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from parrot_gateway.http.connection import http_protocol
from parrot_gateway.server.app import create_app
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.server.reload import SettingsReloader
from parrot_gateway.server.service_manager import keep_alive, notify
from parrot_gateway.settings.config_file import ConfigError, ConfigFile
from parrot_gateway.settings.model import Settings
from parrot_gateway.settings.sources import SettingsSources
from parrot_gateway.telemetry.logs import CallLog, Log, configure_logging, log_uncaught

logger = logging.getLogger(__name__)

#: Garbage collection thresholds above the live objects of some hundred calls, which it would
#: otherwise traverse repeatedly and in vain.
_GC_THRESHOLDS = (10_000, 10, 10)

#: Seconds for clients of cut-off calls to get their error.
CUT_OFF_GRACE_S = 1.0

#: Fewer descriptors cannot support many concurrent streams; raised to the hard limit.
WANTED_DESCRIPTORS = 65536


class DrainingServer(uvicorn.Server):
    """A uvicorn server whose signals first start the drain of the gateway's calls."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Set once connections are accepted.
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.listening.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal (see `uvicorn.Server.serve`)."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: drain at the first, leave at the second."""
        if self._gateway.gate.draining or self._loop is None:
            self.force_exit = True
            self.should_exit = True
            return
        self._gateway.gate.draining = True
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain = asyncio.create_task(self._drain_and_exit(), name="drain")

    async def _drain_and_exit(self) -> None:
        timeout_s = self._gateway.settings.server.drain_timeout_s
        notify("STOPPING=1", "STATUS=waiting for running calls")
        running = self._gateway.gate.running
        deferred = self._gateway.semantic.executor.deferred
        if running or deferred:
            logger.info(
                "waiting up to %g s for %d running calls and %d deferred ones; "
                "a second signal (Ctrl-C) ends at once",
                timeout_s,
                running,
                deferred,
            )
        began = time.monotonic()
        if not await self._gateway.gate.drain(timeout_s):
            logger.warning("%d calls were cut off", self._gateway.gate.cut_off())
            await self._gateway.gate.drain(CUT_OFF_GRACE_S)
        left_s = timeout_s - (time.monotonic() - began)
        if not await self._gateway.semantic.executor.drain(max(0.0, left_s)):
            logger.warning("deferred calls were cut off")
        # Endless streams would keep the server from ending.
        self._gateway.feed.close()
        # Before uvicorn closes their connections, because engines would take that for a lost
        # gateway.
        await self._gateway.stop_engines()
        self.should_exit = True


def run_server(
    settings: Settings,
    *,
    announce: Callable[[Gateway, str, float], None],
    report: Callable[[str], None],
    sources: SettingsSources | None = None,
    read: Callable[[], SettingsSources] | None = None,
) -> int:
    """Serve until a signal; return the exit status, 2 if the settings cannot be used.

    Args:
        settings: as checked by `load_settings`.
        announce: called once when every model is ready, with the gateway, the base URL and the
            seconds since the start.
        report: shows a line to the operator if the log is text; otherwise the line is logged.
        sources: origins of the settings.
        read: rereads the settings, for SIGHUP.
    """
    log = configure_logging(settings.server.log_level, settings.telemetry.log_format)
    log_uncaught()
    if settings.telemetry.log_format == "json":
        report = logger.error
    try:
        return _serve(settings, log, announce, report, sources, read)
    except ConfigError as error:
        report(str(error))
        return 2


def _serve(
    settings: Settings,
    log: Log,
    announce: Callable[[Gateway, str, float], None],
    report: Callable[[str], None],
    sources: SettingsSources | None,
    read: Callable[[], SettingsSources] | None,
) -> int:
    """Do the work of `run_server`.

    Raises:
        ConfigError: the address cannot be bound, or a package is missing.
    """
    started = time.perf_counter()
    _raise_descriptor_limit()
    listeners = [bind(settings.server.host, settings.server.port, "--port")]
    listener, metrics_port, telemetry = listeners[0], None, settings.telemetry
    if telemetry.metrics and telemetry.metrics_port is not None:
        host = telemetry.metrics_host
        listeners.append(bind(host, telemetry.metrics_port, "telemetry.metrics_port"))
        metrics_port = listeners[1].getsockname()[1]
        logger.info("metrics at http://%s:%d/metrics", host, metrics_port)
    host, port = settings.server.host, listener.getsockname()[1]
    shown_host = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104
    if ":" in shown_host:
        shown_host = f"[{shown_host}]"
    root = f"http://{shown_host}:{port}"
    gateway = Gateway(settings)
    sources = sources or SettingsSources(ConfigFile.empty())
    reloader = SettingsReloader(gateway, sources, read)
    gateway.call_records.sinks.append(CallLog(log, settings.server.access_log))
    app = create_app(
        gateway,
        reloader=reloader,
        join_url=root.replace("http://", "ws://") + "/v1/engines/join",
        metrics_port=metrics_port,
    )
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=http_protocol(settings.server.client_timeout_s),
        ws="websockets-sansio",
        ws_max_size=64 * 1024 * 1024,
        ws_per_message_deflate=False,
        lifespan="on",
        server_header=False,
        # X-Forwarded headers are not trusted: nothing here depends on the caller's address.
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    server = DrainingServer(config, gateway)

    status = 0

    async def main() -> None:
        _reload_at_hangup(server, reloader)
        ready = asyncio.create_task(announce_when_ready(), name="announce")
        alive = asyncio.create_task(keep_alive(), name="keep-alive")
        try:
            await server.serve(listeners)
        finally:
            ready.cancel()
            alive.cancel()
            if server.force_exit:
                # NOTE: the loop's end then cancels the application instead of shutting it down, and
                # uvicorn would print a stack trace.
                logging.getLogger("uvicorn.error").disabled = True

    async def announce_when_ready() -> None:
        nonlocal status
        await server.listening.wait()
        # Models may take long; readiness probes report when they are done.
        notify("READY=1", "STATUS=waiting for models")
        await gateway.wait_ready()
        if gateway.gate.draining:
            return
        if gateway.can_serve():
            announce(gateway, f"{root}/v1", time.perf_counter() - started)
            notify(f"STATUS=ready at {root}/v1")
            # Objects that exist by now live as long as the process. Traversing them repeatedly
            # would stop all calls for tens of milliseconds.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLDS)
            return
        for name, reason in gateway.failures().items():
            report(f"{name}: {reason}")
        report("Nothing can be served; stopping.")
        status = 1
        server.should_exit = True

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main())
    return status if server.started else 1


def _reload_at_hangup(server: DrainingServer, reloader: SettingsReloader) -> None:
    """Reload the settings on SIGHUP; if the terminal is gone, end the gateway instead."""
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is None:
        return
    had_terminal = _has_terminal()
    reloads: set[asyncio.Task[None]] = set()

    def hung_up() -> None:
        if had_terminal and not _has_terminal():
            server.handle_exit(signal.SIGTERM, None)
            return
        task = asyncio.create_task(reloader.reload(), name="reload")
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    asyncio.get_running_loop().add_signal_handler(hangup, hung_up)


def _has_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


def bind(host: str, port: int, setting: str) -> socket.socket:
    """Bind a socket to an address; `setting` names what to change if the port is taken.

    Raises:
        ConfigError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. {_advice(error, setting)}"
        ) from None
    listener.set_inheritable(False)
    return listener


def _advice(error: OSError, setting: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Another program has this port: choose one with {setting}."
    if error.errno == errno.EACCES:
        return f"Ports below 1024 may need more rights: choose another with {setting}."
    host = setting.replace("port", "host")
    return f"Is this an address of this machine? Choose one with {host}."


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _raise_descriptor_limit() -> None:
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
