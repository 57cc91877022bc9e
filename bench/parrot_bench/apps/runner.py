"""Runs a workload against a server, as one kind of client or another, over a simulated network.

The distance to the server is simulated by the client: half a round trip before a request is sent,
half after its answer is there, the same for every way of running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp
import msgspec

from parrot_bench.applications.description import Application, Call
from parrot_bench.apps.workload import NAMED, SEMANTIC, Way, Workload
from parrot_bench.servers import BenchmarkError

#: Longest time for one answer, calls that it waits for included.
ANSWER_TIMEOUT_S = 600.0
TEMPERATURE = 0.8
#: Sent with every answer of a gateway to a call with semantic fields.
SESSION_HEADER = "x-parrot-session"


class JobResult(NamedTuple):
    job: Application
    #: From its arrival until all the texts that its client reads are there.
    seconds: float
    #: Those texts, in the order of `job.finals`.
    texts: tuple[str, ...]


class RunResult(NamedTuple):
    jobs: tuple[JobResult, ...]
    #: HTTP requests that were sent.
    requests: int


class GatewayClient:
    """Sends chat completions to one model; use as an asynchronous context manager.

    Args:
        base_url: ending in `/v1`.
        model: name of the model.
        api_key: sent when given.
    """

    def __init__(self, base_url: str, model: str, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        #: Simulated network: seconds for a request and its answer to travel.
        self.round_trip_s = 0.0
        self.requests = 0
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> GatewayClient:
        self._http = aiohttp.ClientSession(
            # Calls that wait for others each hold a connection.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S),
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def complete(
        self, call: Call, messages: list[dict[str, str]], semantic: Mapping[str, Any] | None
    ) -> str:
        """The text of one answer; of a deferred call, what stands for it.

        Args:
            call: its length and seed are used.
            messages: as they are sent.
            semantic: the body's field `parrot`, if any.

        Raises:
            BenchmarkError: no answer, an error, an answer of the wrong length, or a server that
                does not know semantic variables.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": call.tokens,
            "ignore_eos": True,
            "temperature": TEMPERATURE,
            "seed": call.seed,
        }
        if semantic is not None:
            body["parrot"] = semantic
        data = msgspec.json.encode(body)
        await asyncio.sleep(self.round_trip_s / 2)
        status, headers, answer = await self._post(self.base_url + "/chat/completions", data)
        await asyncio.sleep(self.round_trip_s / 2)
        if status != 200:
            raise BenchmarkError(f"{call.name}: status {status}: {answer[:2000].decode()}")
        if semantic is not None and SESSION_HEADER not in headers:
            raise BenchmarkError(f"{self.base_url} does not know semantic variables.")
        try:
            completion = msgspec.json.decode(answer)
            text: str = completion["choices"][0]["message"]["content"] or ""
            usage = completion.get("usage") or {"completion_tokens": call.tokens}
            length = usage["completion_tokens"]
        except (msgspec.MsgspecError, LookupError, TypeError) as error:
            raise BenchmarkError(f"{call.name}: not a chat completion: {error}") from None
        deferred = semantic is not None and semantic.get("defer")
        if length != call.tokens and not deferred:
            raise BenchmarkError(
                f"{call.name}: asked for {call.tokens} tokens and got {length}: the server "
                "does not honour ignore_eos, so that ways of running cannot be compared."
            )
        return text

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of a text; None where the server does not count."""
        data = msgspec.json.encode({"model": self.model, "prompt": text})
        root = self.base_url.removesuffix("/v1")
        status, _, answer = await self._post(f"{root}/tokenize", data)
        try:
            count: int | None = msgspec.json.decode(answer)["count"] if status == 200 else None
        except (msgspec.MsgspecError, LookupError, TypeError):
            return None
        return count

    async def health(self) -> dict[str, Any]:
        """A gateway's `/health`.

        Raises:
            BenchmarkError: it does not answer.
        """
        url = self.base_url.removesuffix("/v1") + "/health"
        try:
            async with self._http.get(url) as response:
                answer: dict[str, Any] = msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            raise BenchmarkError(f"{url} does not answer: {error or 'timeout'}") from None
        return answer

    async def forget(self, session: str) -> None:
        """Delete a session. What cannot be deleted expires."""
        url = f"{self.base_url}/sessions/{session}"
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._http.delete(url) as response:
                await response.read()

    async def _post(self, url: str, data: bytes) -> tuple[int, Mapping[str, str], bytes]:
        self.requests += 1
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.post(url, data=data, headers=headers) as response:
                return response.status, response.headers, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchmarkError(f"{url} does not answer: {error or 'timeout'}") from None


async def run_workload(
    client: GatewayClient, workload: Workload, way: Way, session: str, *, own_sessions: bool = False
) -> RunResult:
    """Run all jobs, each from its arrival on.

    Args:
        client: of the server.
        workload: its jobs run at the same time.
        way: the same for all jobs.
        session: name of an unused session, for semantic variables.
        own_sessions: each job has its own session, which is deleted when its client has what it
            reads.

    Raises:
        BenchmarkError: any call failed; the others are cancelled.
    """
    before = client.requests
    start = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for job in workload.jobs:
                name = f"{session}-{job.name}" if own_sessions else session
                running = _run_job(client, job, way, name, start, forget=own_sessions)
                tasks.append(group.create_task(running))
    except* BenchmarkError as failures:
        raise _first(failures) from None
    return RunResult(tuple(task.result() for task in tasks), client.requests - before)


async def _run_job(
    client: GatewayClient, job: Application, way: Way, session: str, start: float, *, forget: bool
) -> JobResult:
    await asyncio.sleep(max(0.0, start + job.arrives_s - time.perf_counter()))
    began = time.perf_counter()
    if way == "one by one":
        texts = await _one_by_one(client, job)
    elif way == "parallel":
        texts = await _parallel(client, job, None)
    elif way == NAMED:
        texts = await _parallel(client, job, session)
    else:
        texts = await _semantic(client, job, session)
    seconds = time.perf_counter() - began
    if forget and way in (NAMED, SEMANTIC):
        await client.forget(session)
    return JobResult(job, seconds, tuple(texts[name] for name in job.finals))


async def _one_by_one(client: GatewayClient, job: Application) -> dict[str, str]:
    texts: dict[str, str] = {}
    for call in job.calls:
        await asyncio.sleep(call.pause_s)
        texts[call.name] = await client.complete(call, call.messages(texts.__getitem__), None)
    return texts


async def _parallel(client: GatewayClient, job: Application, session: str | None) -> dict[str, str]:
    tasks: dict[str, asyncio.Task[str]] = {}

    async def run(call: Call) -> str:
        texts = {name: await tasks[name] for name in call.reads}
        await asyncio.sleep(call.pause_s)
        semantic = None
        if session is not None:
            semantic = {"session": session}
            if call.objective:
                semantic["objective"] = call.objective
        return await client.complete(call, call.messages(texts.__getitem__), semantic)

    async with asyncio.TaskGroup() as group:
        for call in job.calls:
            tasks[call.name] = group.create_task(run(call))
    return {name: task.result() for name, task in tasks.items()}


async def _semantic(client: GatewayClient, job: Application, session: str) -> dict[str, str]:
    tasks: dict[str, asyncio.Task[str]] = {}
    async with asyncio.TaskGroup() as group:
        for call in job.calls:
            semantic: dict[str, Any] = {"session": session, "output": call.name}
            if call.reads:
                semantic["inputs"] = {name: name for name in call.reads}
            if call.objective:
                semantic["objective"] = call.objective
            if call.name not in job.finals:
                semantic["defer"] = True
            messages = call.messages(lambda name: "{{" + name + "}}")
            tasks[call.name] = group.create_task(client.complete(call, messages, semantic))
    return {name: tasks[name].result() for name in job.finals}


def _first(failures: BaseExceptionGroup[BenchmarkError]) -> BenchmarkError:
    """One of the reasons, the first that was met."""
    found: BaseException = failures
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, BenchmarkError)
    return found
