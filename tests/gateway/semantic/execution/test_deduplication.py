"""Identical calls of a session are run once, if they are deterministic."""

from __future__ import annotations

import asyncio
import json

import pytest
from harness.gateway.scripted_runner import ScriptedRunner, service_of, session_of, submit
from harness.waiting import until

from parrot_gateway.exceptions import DependencyFailedError, InvalidRequestError
from parrot_gateway.semantic.execution import deduplication
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.templates.reference import reference_of
from parrot_gateway.semantic.transforms.transform import parse_transform

SEEDED = {"temperature": 0}


async def test_identical_deterministic_calls_run_once() -> None:
    runner = ScriptedRunner()
    async with session_of(runner) as (service, session):
        source = submit(service, session, "src", "in")
        prompts = [reference_of(source.id), reference_of(source.id), "(in)"]
        outputs = [
            submit(service, session, f"v{i}", prompt, body=SEEDED)
            for i, prompt in enumerate(prompts)
        ]
        for output in outputs:
            assert await service.readers.value(output) == "((in))"
        assert len(runner.bodies) == 2
        assert service.executor.statistics().deduplicated == 2


async def test_a_seed_makes_calls_identical() -> None:
    runner = ScriptedRunner()
    async with session_of(runner) as (service, session):
        for name in ("a", "b"):
            body = {"temperature": 1, "seed": 7}
            assert await service.readers.value(submit(service, session, name, "x", body=body))
        assert len(runner.bodies) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"body": SEEDED}, {"body": {"temperature": 0, "max_tokens": 3}}),
        ({"body": SEEDED}, {"body": SEEDED, "dedupe": False}),
        ({"body": SEEDED}, {"body": SEEDED, "transform": parse_transform("upper")}),
        ({"body": {"seed": 1}}, {"body": {"seed": 2}}),
        ({"body": SEEDED | {"stop": "a"}}, {"body": SEEDED | {"stop": "b"}}),
        ({"body": SEEDED}, {"body": SEEDED | {"stop": ["\n"]}}),
        ({"body": SEEDED}, {"body": SEEDED | {"logit_bias": {"5": -100}}}),
        ({"body": SEEDED}, {"body": SEEDED | {"response_format": {"type": "json_object"}}}),
    ],
)
async def test_others_run_each(first: dict[str, object], second: dict[str, object]) -> None:
    runner = ScriptedRunner()
    async with session_of(runner) as (service, session):
        await service.readers.value(submit(service, session, "a", "x", **first))
        await service.readers.value(submit(service, session, "b", "x", **second))
        assert len(runner.bodies) == 2


@pytest.mark.parametrize(
    "other", [{"user": "u"}, {"metadata": {"run": "2"}}, {"store": True}, {"stream": True}]
)
async def test_fields_that_cannot_change_the_text_do_not_count(other: dict[str, object]) -> None:
    runner = ScriptedRunner()
    async with session_of(runner) as (service, session):
        await service.readers.value(submit(service, session, "a", "x", body=SEEDED))
        await service.readers.value(submit(service, session, "b", "x", body=SEEDED | other))
        assert len(runner.bodies) == 1


async def test_other_sessions_do_not_share() -> None:
    runner = ScriptedRunner()
    async with service_of(runner) as service:
        for name in ("one", "other"):
            session = service.session("t", name)
            await service.readers.value(submit(service, session, "a", "x", body=SEEDED))
        assert len(runner.bodies) == 2


async def test_the_twin_of_a_cancelled_call_runs_itself() -> None:
    runner = ScriptedRunner.hanging()
    async with session_of(runner) as (service, session):
        first = submit(service, session, "a", "x", body=SEEDED)
        second = submit(service, session, "b", "x", body=SEEDED)
        await until(lambda: second.state == "running" and runner.running == 1)
        runner.act = runner.echo
        assert first.producer is not None
        service.cancel_call("t", first.producer)
        assert await service.readers.value(second) == "(x)"


async def test_the_twin_of_a_call_that_fails_fails_with_it() -> None:
    runner = ScriptedRunner()
    go_on = asyncio.Event()

    async def act(job: Job, prompt: str) -> None:
        await go_on.wait()
        raise InvalidRequestError("not now")

    runner.act = act
    async with session_of(runner) as (service, session):
        submit(service, session, "a", "x", body=SEEDED)
        second = submit(service, session, "b", "x", body=SEEDED)
        await until(lambda: second.state == "running" and runner.running == 1)
        go_on.set()
        with pytest.raises(DependencyFailedError, match="not now"):
            await service.readers.value(second)
        assert len(runner.bodies) == 1


async def test_only_so_many_calls_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplication, "MAX_REMEMBERED", 2)
    runner = ScriptedRunner()
    async with session_of(runner) as (service, session):
        for number, prompt in enumerate("abcca"):
            await service.readers.value(submit(service, session, f"v{number}", prompt, body=SEEDED))
        prompts = [json.loads(body)["prompt"] for body in runner.bodies]
        assert prompts == ["a", "b", "c", "a"]


async def test_nothing_is_kept_of_a_session_that_ended() -> None:
    async with session_of(ScriptedRunner()) as (service, session):
        await service.readers.value(submit(service, session, "a", "x", body=SEEDED))
        assert len(service.executor.deduplication) == 1
        service.close_session(session)
        assert len(service.executor.deduplication) == 0


async def test_what_failed_once_is_tried_again_when_asked_again() -> None:
    runner = ScriptedRunner()

    async def act(job: Job, prompt: str) -> None:
        raise InvalidRequestError("not now")

    async with session_of(runner) as (service, session):
        runner.act = act
        first = submit(service, session, "a", "x", body=SEEDED)
        await service.readers.wait(first, 5)
        runner.act = runner.echo
        assert await service.readers.value(submit(service, session, "b", "x", body=SEEDED)) == "(x)"
