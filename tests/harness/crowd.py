"""Calls of every kind to a gateway at once, and how far they have come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import aiohttp
from parrot_bench.chaos.answers import Answer, call
from parrot_bench.chaos.mix import Request

from harness.processes import GatewayProcess
from harness.waiting import until

#: Longest wait for answers on a busy machine.
DEADLINE_S = 90.0


class Crowd:
    """Clients of one call each; an asynchronous context manager, whose exit leaves no task behind.

    Args:
        gateway: of whose engines they ask.
        requests: their calls, sent on entering.
    """

    def __init__(self, gateway: GatewayProcess, requests: Sequence[Request]) -> None:
        self._url = gateway.base_url
        self._tasks: list[asyncio.Task[Answer]] = []
        #: In the order of the requests; they grow.
        self.answers = [Answer(request) for request in requests]
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)
        self._tasks = [
            asyncio.create_task(call(self._http, self._url, answer)) for answer in self.answers
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    @property
    def chunks(self) -> int:
        """Chunks with content that have come so far, over all clients."""
        return sum(len(answer.arrivals) for answer in self.answers)

    async def reach(self, chunks: int) -> None:
        """Return once so much has come, or every answer is whole."""
        await until(
            lambda: self.chunks >= chunks or all(task.done() for task in self._tasks), DEADLINE_S
        )

    async def begun(self) -> None:
        """Return once every stream has content."""
        await until(
            lambda: all(
                answer.arrivals or not answer.request.is_streamed or task.done()
                for answer, task in zip(self.answers, self._tasks, strict=True)
            ),
            DEADLINE_S,
        )

    async def finish(self) -> list[Answer]:
        """Return all answers once they have ended, whole or not."""
        async with asyncio.timeout(DEADLINE_S):
            return list(await asyncio.gather(*self._tasks))


async def ask_all(gateway: GatewayProcess, requests: Sequence[Request]) -> list[Answer]:
    """The answers to all of the calls, sent at once."""
    async with Crowd(gateway, requests) as crowd:
        return await crowd.finish()
