"""Groups that clients declare: what members are for, and that the scheduler sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.gateway.scripted_remote import SYSTEM, ScriptedRemoteEngine, fills, small_engine
from harness.gateway.scripted_runner import ScriptedRunner, service_of, spec
from harness.gateway.semantic_tools import Http, echo
from harness.gateway.serving import Service, serving
from harness.waiting import until
from parrot_scheduler.event_log import read_step, replay
from parrot_scheduler.events import Event, TaskSubmitted, TaskUpdated
from parrot_scheduler.task import LATENCY, THROUGHPUT, Objective, Task

from parrot_gateway.semantic.call_spec import parse_objective
from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.templates.text_template import Binding
from parrot_gateway.settings.model import SchedulerSettings


def shown(service: SemanticService, job: Any) -> tuple[str, list[tuple[str, int, str]]]:
    """Return the objective of a call, and the groups that the scheduler is told of."""
    service.objectives.update(job.session)
    metadata = service.metadata_of(job)
    groups = [(g.id.partition("/")[2], g.size, str(g.objective)) for g in metadata.groups]
    return str(metadata.objective), groups


async def test_members_come_and_go() -> None:
    async with service_of(ScriptedRunner()) as service:
        session = service.session("t", "s")
        jobs = []
        first = service.submit(session, spec("a", group="g"), attended=True)
        assert shown(service, first) == ("latency", [("group g", 1, "latency")])
        jobs = [first]
        jobs += [service.submit(session, spec("b", group="g"), attended=True) for _ in range(2)]
        other = service.submit(session, spec("c"), attended=True)
        for job in jobs:
            assert shown(service, job) == ("throughput", [("group g", 3, "latency")])
        assert shown(service, other) == ("latency", [])
        service.executor.cancel(jobs[0])
        assert shown(service, jobs[1]) == ("throughput", [("group g", 2, "latency")])
        service.executor.cancel(jobs[2])
        assert shown(service, jobs[1]) == ("latency", [("group g", 1, "latency")])
        service.executor.cancel(jobs[1])
        service.executor.cancel(other)
        assert service.objectives._declared == {}


async def test_an_objective_of_its_own_stays() -> None:
    async with service_of(ScriptedRunner()) as service:
        session = service.session("t", "s")
        ttft = parse_objective("ttft=1s")
        kinds = [LATENCY, THROUGHPUT, ttft, None]
        jobs = [
            service.submit(session, spec("a", group="g", objective=each), attended=True)
            for each in kinds
        ]
        found = [shown(service, job)[0] for job in jobs]
        assert found == ["latency", "throughput", "ttft=1s", "throughput"]
        for job in jobs:
            service.executor.cancel(job)


async def test_a_member_that_needs_another_makes_no_group() -> None:
    """One branch of two calls, both submitted at once: nothing runs side by side."""
    async with service_of(ScriptedRunner()) as service:
        session = service.session("t", "s")
        seed, draft, final = (session.variable(name) for name in ("seed", "draft", "final"))
        one = service.submit(session, spec("x", draft, group="g", **reading("x", seed.id)))
        two = service.submit(session, spec("y", final, group="g", **reading("y", draft.id)))
        service.objectives.begin_wait(final, LATENCY)
        assert shown(service, one)[0] == shown(service, two)[0] == "latency"
        more = service.submit(session, spec("z", group="g", **reading("z", seed.id)), attended=True)
        assert [shown(service, job)[0] for job in (one, two, more)] == ["throughput"] * 3
        service.objectives.end_wait(final)
        for job in (one, two, more):
            service.executor.cancel(job)


def reading(name: str, variable: str) -> dict[str, Any]:
    """Fields of a call whose prompt is one variable."""
    return {"body": {"prompt": "{{" + name + "}}"}, "inputs": {name: Binding(variable_id=variable)}}


async def test_a_deferred_group_is_for_what_its_strongest_reader_wants() -> None:
    async with service_of(ScriptedRunner()) as service:
        session = service.session("t", "s")
        seed = session.variable("seed")
        outputs = [session.variable(f"o{number}") for number in range(3)]
        jobs = [
            service.submit(session, spec("x", output, group="g", **reading("x", seed.id)))
            for output in outputs
        ]
        assert shown(service, jobs[0]) == ("throughput", [("group g", 3, "throughput")])
        service.objectives.begin_wait(outputs[1], LATENCY)
        for job in jobs:
            service.objectives.update(job.session)
            assert shown(service, job) == ("throughput", [("group g", 3, "latency")])
        service.objectives.end_wait(outputs[1])
        for job in jobs:
            service.executor.cancel(job)


async def test_groups_end_with_their_session() -> None:
    runner = ScriptedRunner.hanging()
    async with service_of(runner) as service:
        session = service.session("t", "s")
        for number in range(4):
            service.submit(session, spec("a", group=f"g{number % 2}"), attended=True)
        service.close_session(session)
        assert service.objectives._declared == {}


async def grouped(tmp_path: Path, group: str | None) -> tuple[list[Task], dict[str, Any]]:
    """Four plain calls with one prompt, each with a client of its own; then the tasks as the
    scheduler was told of them, and the session's graph, with how many calls each engine got."""
    log = tmp_path / "decisions.jsonl"
    scripted = [small_engine(4, automatic=False) for _ in range(2)]
    for engine in scripted:
        echo(engine)
    settings = SchedulerSettings(record=log)
    async with serving(*scripted, scheduler=settings) as service, Http(service) as http:
        fields = {"session": "s", "run": "r1", "parent": "p1"}
        if group is not None:
            fields["group"] = group

        async def call(number: int) -> int:
            text = f"{SYSTEM}{number}"
            # Little to generate: on a CPU long outputs are worth more than so short a prefix.
            answer = await http.call("/v1/completions", text, parrot=fields, max_tokens=4)
            return answer.status_code

        calls = []
        for number in range(4):
            calls.append(asyncio.create_task(call(number)))
            await until(lambda: sum(map(fills, scripted)) == len(calls))
        at = [fills(engine) for engine in scripted]
        for engine in scripted:
            engine.automatic = True
            engine.step()
        assert await asyncio.gather(*calls) == [200] * 4
        graph = (await http.get("/v1/sessions/s/graph")).json()
        one = (await http.get(f"/v1/calls/{graph['calls'][0]['id']}")).json()
        assert {key: one[key] for key in ("run", "parent", "group")} == {
            "run": "r1",
            "parent": "p1",
            "group": group,
        }
        await service.gateway.close()
    tasks = [event.task for event in told(log) if isinstance(event, TaskSubmitted)]
    return tasks, graph | {"at": sorted(at)}


async def test_the_scheduler_sees_a_declared_group(tmp_path: Path) -> None:
    tasks, graph = await grouped(tmp_path, "maps")
    assert len(tasks) == 4
    (name,) = {group.id.partition("/")[2] for task in tasks for group in task.groups}
    assert name == "group maps"
    # The first one had no company yet, and was not slowed down.
    assert [task.groups[0].size for task in tasks] == [1, 2, 3, 4]
    kinds = [task.objective.kind for task in tasks]
    assert kinds == ["latency", "throughput", "throughput", "throughput"]
    assert {call["group"] for call in graph["calls"]} == {"maps"}
    assert {call["run"] for call in graph["calls"]} == {"r1"}
    # They share their prompt and are together.
    assert max(graph["at"]) > 2
    assert sum(call["placement"].startswith("prefix of 2") for call in graph["calls"]) >= 2


async def test_calls_without_a_group_meet_where_their_prompt_is_computed(tmp_path: Path) -> None:
    tasks, graph = await grouped(tmp_path, None)
    assert {task.groups for task in tasks} == {()}
    assert {task.objective.kind for task in tasks} == {"latency"}
    assert graph["at"] == [0, 4]


@pytest.mark.parametrize("field", ["run", "parent", "group"])
async def test_too_long_ids_are_refused_by_name(field: str) -> None:
    async with serving(small_engine()) as service, Http(service) as http:
        answer = await http.call("/v1/completions", "a", parrot={field: "x" * 257})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"parrot.{field}"
        header = {f"X-Parrot-{field.title()}": "x" * 257}
        body = {"model": "m", "prompt": "a"}
        answer = await http.post("/v1/completions", json=body, headers=header)
        assert answer.json()["error"]["param"] == f"X-Parrot-{field.title()}"


# -- what becomes known later ---------------------------------------------------------------


def calls_of(service: Service, session: str) -> list[CallNode]:
    """The calls of a session, in order of submission."""
    graph = service.gateway.semantic.session("default", session).graph
    return sorted(
        (node for node in graph if isinstance(node, CallNode)), key=lambda node: node.submitted
    )


def told(log: Path) -> list[Event]:
    """Return what the scheduler was told; the log must replay to the same decisions."""
    lines = log.read_text().splitlines()
    decided = [line for line in lines if line.startswith('{"actions"')]
    assert list(replay(lines)) == decided
    return [e for line in lines if line.startswith('{"now"') for e in read_step(line).events]


@asynccontextmanager
async def full_engine(
    log: Path,
) -> AsyncIterator[tuple[Service, Http, ScriptedRemoteEngine, asyncio.Task[httpx.Response]]]:
    """A served engine for one call at a time, and the call that it has; decisions are logged."""
    engine = small_engine(1, automatic=False)
    settings = SchedulerSettings(record=log)
    async with serving(engine, scheduler=settings) as service, Http(service) as http:
        first = asyncio.create_task(http.call("/v1/completions", "a"))
        await until(lambda: fills(engine) == 1)
        yield service, http, engine, first


async def test_a_stronger_wait_reaches_a_call_that_is_queued(tmp_path: Path) -> None:
    """A deferred call waits for a place behind others; then somebody reads what it writes."""
    log = tmp_path / "decisions.jsonl"
    async with full_engine(log) as (service, http, engine, first):
        for name in ("early", "late"):
            fields = {"session": name, "output": name, "defer": True}
            await http.call("/v1/completions", name, parrot=fields)
        await until(lambda: service.gateway.scheduling.describe()["tasks"] == 3)
        late = service.gateway.semantic.session("default", "late").variable("late")
        reader = asyncio.create_task(http.value(late.id))
        await until(lambda: [c.objective for c in calls_of(service, "late")] == [LATENCY])
        engine.automatic = True
        engine.step()
        assert (await reader).status_code == (await first).status_code == 200
        await http.settled()
        (one,), (other,) = calls_of(service, "early"), calls_of(service, "late")
        assert other.finished < one.finished
        assert len(service.gateway.task_updater) == 0
        await service.gateway.close()
    updates = [event for event in told(log) if isinstance(event, TaskUpdated)]
    assert [update.objective for update in updates] == [Objective("latency")]


async def test_the_last_member_of_a_group_that_is_queued_is_not_slowed_down(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    async with full_engine(log) as (service, http, engine, first):
        calls = []
        for number in range(2):
            body = {"session": "s", "group": "g", "name": f"{number}"}
            call = http.call("/v1/completions", f"member {number}", parrot=body)
            calls.append(asyncio.create_task(call))
            await until(lambda: service.gateway.scheduling.describe()["tasks"] == 1 + len(calls))
        one, other = calls_of(service, "s")
        assert one.objective == other.objective == THROUGHPUT
        await http.delete(f"/v1/calls/{one.id}")
        assert other.objective == LATENCY
        engine.automatic = True
        engine.step()
        assert [(await call).status_code for call in (first, *calls)] == [200, 409, 200]
        await http.settled()
        await service.gateway.close()
    events = told(log)
    tasks = [event.task for event in events if isinstance(event, TaskSubmitted)]
    updates = [event for event in events if isinstance(event, TaskUpdated)]
    # The first one becomes part of the group when the second one comes, which is latency again
    # once it is alone.
    assert [(u.task_id, u.objective, u.groups and u.groups[0].size) for u in updates] == [
        (tasks[1].id, Objective("throughput"), 2),
        (tasks[2].id, Objective("latency"), 1),
    ]


async def test_a_group_that_is_deduced_later_is_told(tmp_path: Path) -> None:
    """Two deferred calls run; then comes the one that reads both, and a client waits for it."""
    log = tmp_path / "decisions.jsonl"
    engine = small_engine(4, automatic=False)
    settings = SchedulerSettings(record=log)
    async with serving(engine, scheduler=settings) as service, Http(service) as http:
        for name in ("a", "b"):
            fields = {"session": "s", "output": name, "defer": True}
            await http.call("/v1/completions", f"map {name}", parrot=fields)
        await until(lambda: fills(engine) == 2)
        reduce = {"session": "s", "inputs": {"a": "a", "b": "b"}}
        last = asyncio.create_task(http.call("/v1/completions", "{{a}}{{b}}", parrot=reduce))
        await until(lambda: len(calls_of(service, "s")) == 3)
        engine.automatic = True
        engine.step()
        assert (await last).status_code == 200
        await http.settled()
        await service.gateway.close()
    updates = [event for event in told(log) if isinstance(event, TaskUpdated)]
    assert len(updates) == 2
    (group,) = {update.groups for update in updates}
    assert group is not None
    assert (group[0].size, group[0].objective) == (2, Objective("latency"))
    # Members stay throughput, and something waits for each of them now.
    assert {(update.objective, update.successors) for update in updates} == {(None, 1)}
