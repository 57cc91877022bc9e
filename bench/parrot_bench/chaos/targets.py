"""The targets of faults: engine processes of a gateway, engines behind links, and servers."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias
from urllib.request import urlopen

import aiohttp

from parrot_bench.apps.arms import Arm, Fleet, check_memory, start_arms
from parrot_bench.apps.runner import GatewayClient
from parrot_bench.chaos.link_proxy import LinkProxy
from parrot_bench.servers import BenchmarkError, clean_environment, free_port
from parrot_gateway.settings import DEMO_MODEL

Fault: TypeAlias = Literal["kill", "stop", "cut", "replace", "none"]

_HEARTBEAT_S = 0.5
#: Longest wait for an engine or a server to be there (again).
_READY_TIMEOUT_S = 120.0
_POLL_S = 0.05
_ADMIN_KEY = secrets.token_hex(16)
_JOIN_KEY = secrets.token_hex(16)
_ENV = {"PARROT_ADMIN_KEY": _ADMIN_KEY, "PARROT_JOIN_KEY": _JOIN_KEY}


class Plan(NamedTuple):
    """The faults, and whom they strike."""

    fault: Fault
    engines: int
    #: Servers of one upstream, not engines of the gateway.
    upstreams: bool
    #: A stopped process goes on after so long.
    stop_s: float


class Targets(Protocol):
    """Engines or servers by number."""

    async def ready(self) -> Sequence[int]:
        """The numbers of those that answer."""
        ...

    async def strike(self, number: int) -> None:
        """Let the fault happen to one; returns once it has happened, and is over where it ends."""
        ...

    async def restarts(self) -> int:
        """How often one of them began anew."""
        ...


@asynccontextmanager
async def started(plan: Plan) -> AsyncIterator[tuple[GatewayClient, Targets]]:
    """A gateway with its engines or servers.

    Raises:
        BenchmarkError: something did not start.
    """
    check_memory(plan.engines)
    async with AsyncExitStack() as stack:
        if plan.upstreams:
            servers = Servers(plan)
            stack.push_async_callback(servers.stop)
            await servers.start()
            upstream = {
                "name": "pair",
                "urls": servers.urls,
                "models": [DEMO_MODEL],
                "stream_failure": {"mode": "continue"},
            }
            settings: dict[str, Any] = {"models": [], "upstreams": [upstream]}
            yield await _gateway(stack, plan, settings), servers
        elif plan.fault == "cut":
            link = {"join_key": "env:PARROT_JOIN_KEY", "heartbeat_s": _HEARTBEAT_S}
            client = await _gateway(stack, plan, {"models": [], "engines": link})
            linked = LinkedEngines(plan, client)
            stack.push_async_callback(linked.stop)
            await linked.start(stack)
            yield client, linked
        else:
            client = await _gateway(stack, plan, {})
            http = await stack.enter_async_context(aiohttp.ClientSession())
            yield client, EngineProcesses(plan, client, http)


async def _gateway(stack: AsyncExitStack, plan: Plan, settings: dict[str, Any]) -> GatewayClient:
    arm = Arm("chaos", "semantic variables", settings, env=_ENV)
    return (await start_arms(stack, [arm], Fleet(DEMO_MODEL, plan.engines)))["chaos"]


class EngineProcesses:
    """The engine processes that `serve` keeps running."""

    def __init__(self, plan: Plan, client: GatewayClient, http: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._client = client
        self._http = http

    async def ready(self) -> Sequence[int]:
        processes = await self._processes()
        return [number for number, each in enumerate(processes) if each["state"] == "ready"]

    async def restarts(self) -> int:
        return sum(each["restarts"] for each in await self._processes())

    async def strike(self, number: int) -> None:
        process = (await self._processes())[number]
        if self._plan.fault == "replace":
            await self._replace(number, process["name"], process["pid"])
        elif process["pid"] is not None:
            await _strike_process(process["pid"], self._plan)

    async def _replace(self, number: int, name: str, pid: int) -> None:
        """Drain it, give its calls some time, end it, and wait for the next process.

        Raises:
            BenchmarkError: it does not come back.
        """
        await self._order(name, "drain")
        engines = (await self._client.health())["engines"]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._plan.stop_s):
                while any(each["running"] for each in engines if each["name"] == name):
                    await asyncio.sleep(_POLL_S)
                    engines = (await self._client.health())["engines"]
        os.kill(pid, signal.SIGTERM)
        ends = time.monotonic() + _READY_TIMEOUT_S
        while True:
            process = (await self._processes())[number]
            if process["state"] == "ready" and process["pid"] != pid:
                break
            if time.monotonic() > ends:
                raise BenchmarkError(f"{name} did not come back: it is {process['state']}.")
            await asyncio.sleep(_POLL_S)
        await self._order(name, "undrain")

    async def _order(self, name: str, what: str) -> None:
        root = self._client.base_url.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {_ADMIN_KEY}"}
        async with self._http.post(
            f"{root}/admin/v1/engines/{name}/{what}", headers=headers
        ) as answer:
            if answer.status != 200:
                raise BenchmarkError(f"{what} {name}: {await answer.text()}")

    async def _processes(self) -> list[dict[str, Any]]:
        processes: list[dict[str, Any]] = (await self._client.health())["engine_processes"]
        return processes


class LinkedEngines:
    """Engines that join through a proxy each, which cuts their link."""

    def __init__(self, plan: Plan, client: GatewayClient) -> None:
        self._client = client
        self._names = [f"chaos-{number}" for number in range(plan.engines)]
        self._proxies: list[LinkProxy] = []
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self, stack: AsyncExitStack) -> None:
        """Start all, and wait until they have joined.

        Raises:
            BenchmarkError: one did not join.
        """
        for name in self._names:
            proxy = await stack.enter_async_context(LinkProxy(self._client.base_url))
            self._proxies.append(proxy)
            url = f"ws://127.0.0.1:{proxy.port}/v1/engines/join"
            command = ("engine", "--model", DEMO_MODEL, "--join", url, "--engine-name", name)
            self._processes.append(await _start(*command))
        await _until_ready(self, len(self._names))

    async def stop(self) -> None:
        await asyncio.gather(*map(_end, self._processes))

    async def ready(self) -> Sequence[int]:
        engines = (await self._client.health())["engines"]
        there = {each["name"] for each in engines if each["state"] == "ready"}
        return [number for number, name in enumerate(self._names) if name in there]

    async def strike(self, number: int) -> None:
        self._proxies[number].cut()

    async def restarts(self) -> int:
        return sum(proxy.connections - 1 for proxy in self._proxies)


class Servers:
    """Servers of one upstream; one that dies is started again at once, at the same port."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ports = [free_port() for _ in range(plan.engines)]
        self._processes: list[asyncio.subprocess.Process] = []
        self._restarts = 0
        self.urls = [f"http://127.0.0.1:{port}/v1" for port in self._ports]

    async def start(self) -> None:
        """Start all, and wait until they answer.

        Raises:
            BenchmarkError: one does not.
        """
        for port in self._ports:
            self._processes.append(await self._server(port))
        await _until_ready(self, len(self._ports))

    async def stop(self) -> None:
        await asyncio.gather(*map(_end, self._processes))

    async def ready(self) -> Sequence[int]:
        are_ready = await asyncio.gather(
            *(asyncio.to_thread(_is_ready, port) for port in self._ports)
        )
        return [number for number, is_ready in enumerate(are_ready) if is_ready]

    async def strike(self, number: int) -> None:
        process = self._processes[number]
        if self._plan.fault == "replace":
            process.terminate()
        else:
            await _strike_process(process.pid, self._plan)
        if self._plan.fault != "stop":
            await process.wait()
            self._processes[number] = await self._server(self._ports[number])
            self._restarts += 1
            # Nobody can help while the others are struck before this one is back.
            await missing(self, len(self._ports))

    async def restarts(self) -> int:
        return self._restarts

    async def _server(self, port: int) -> asyncio.subprocess.Process:
        return await _start("serve", "--model", DEMO_MODEL, "--port", str(port))


def _is_ready(port: int) -> bool:
    """Ask a gateway if it serves its models."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/health/readiness", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "parrot_gateway", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=clean_environment(_ENV | {"OMP_NUM_THREADS": "1"}),
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def missing(targets: Targets, count: int) -> int:
    """Wait until `count` of them answer; the number that still does not after a while."""
    ends = time.monotonic() + _READY_TIMEOUT_S
    while True:
        absent = count - len(await targets.ready())
        if not absent or time.monotonic() > ends:
            return absent
        await asyncio.sleep(_POLL_S)


async def _until_ready(targets: Targets, count: int) -> None:
    absent = await missing(targets, count)
    if absent:
        raise BenchmarkError(f"{absent} of {count} engines did not start.")


async def _strike_process(pid: int, plan: Plan) -> None:
    with suppress(ProcessLookupError):
        if plan.fault == "kill":
            os.kill(pid, signal.SIGKILL)
        elif plan.fault == "stop":
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(plan.stop_s)
            finally:
                os.kill(pid, signal.SIGCONT)
