"""Semantic services whose calls a scripted runner answers, and what is left of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.semantic.call_spec import CallSpec
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.variable import Variable
from parrot_gateway.settings.model import SessionSettings


class ScriptedRunner:
    """Answers with the prompt in brackets, word by word; or as a test says."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.running = 0
        self.most_running = 0
        self.act: Callable[[Job, str], Awaitable[None]] = self.echo

    async def run(self, job: Job, request: CallRequest, metadata: CallMetadata) -> None:
        """See `CallRunner.run`."""
        self.bodies.append(request.body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.act(job, json.loads(request.body)["prompt"])
        finally:
            self.running -= 1

    async def echo(self, job: Job, prompt: str) -> None:
        for part in ("(", prompt, ")"):
            job.append(part, 0.0)
            await asyncio.sleep(0)

    @classmethod
    def hanging(cls) -> ScriptedRunner:
        """A runner whose calls never end."""

        async def hang(job: Job, prompt: str) -> None:
            await asyncio.get_running_loop().create_future()

        runner = cls()
        runner.act = hang
        return runner

    @classmethod
    def failing(cls, error: Exception, text: str = "") -> ScriptedRunner:
        """A runner whose calls fail, after they have said `text`."""

        async def fail(job: Job, prompt: str) -> None:
            job.append(text, 0.0)
            raise error

        runner = cls()
        runner.act = fail
        return runner


def gauges(service: SemanticService) -> dict[str, int]:
    """Return the gauges, which must be zero when there is nothing to do."""
    found = service.executor.statistics()._asdict()
    names = ("waiting", "in_line", "running", "held_bytes", "tasks")
    return {name: found[name] for name in names} | {"readers": service.describe()["readers"]}


def check_quiet(service: SemanticService) -> None:
    """Nothing is left over."""
    assert set(gauges(service).values()) == {0}, gauges(service)
    assert service.executor.unfinished.is_empty
    assert service.objectives.num_waited == 0
    for session in service.sessions.of_tenant("t"):
        session.graph.check_integrity()
        assert session.is_idle
        assert all(variable.num_listeners == 0 for variable in session)


@asynccontextmanager
async def service_of(
    runner: ScriptedRunner, *, call_timeout_s: float = 20.0, **limits: float
) -> AsyncIterator[SemanticService]:
    service = SemanticService(
        SessionSettings(**limits),  # type: ignore[arg-type]
        runner,
        call_timeout_s=call_timeout_s,
    )
    try:
        yield service
        async with asyncio.timeout(60):
            await service.executor.drain(5)
    finally:
        await service.close()
    check_quiet(service)
    assert runner.running == 0


@asynccontextmanager
async def session_of(
    runner: ScriptedRunner, **settings: float
) -> AsyncIterator[tuple[SemanticService, Session]]:
    """A service, and a session of it."""
    async with service_of(runner, **settings) as service:
        yield service, service.session("t", "s")


def spec(prompt: str, output: Variable | None = None, **fields: object) -> CallSpec:
    body = {"model": "m", "prompt": prompt, **(fields.pop("body", None) or {})}  # type: ignore[dict-item]
    return CallSpec(
        request=CallRequest("completions", json.dumps(body).encode()),
        output=None if output is None else output.id,
        **fields,  # type: ignore[arg-type]
    )


def submit(
    service: SemanticService, session: Session, name: str, prompt: str, **fields: object
) -> Variable:
    """A deferred call; its output."""
    output = session.variable(name)
    service.submit(session, spec(prompt, output, **fields))
    return output
