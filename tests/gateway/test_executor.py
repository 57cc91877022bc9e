"""The executor on a scripted runner: order, failures that travel, nothing left over."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import until

from parrot_gateway.core.call_spec import CallSpec
from parrot_gateway.core.job import Job
from parrot_gateway.core.objective import LATENCY, THROUGHPUT, Objective
from parrot_gateway.core.reference import reference_of
from parrot_gateway.core.semantic_service import SemanticService
from parrot_gateway.core.session import Session
from parrot_gateway.core.template import Binding
from parrot_gateway.core.transform import parse_transform
from parrot_gateway.core.variable import Variable
from parrot_gateway.exceptions import (
    CycleError,
    DeadlineError,
    DependencyFailedError,
    DoubleProducerError,
    GatewayError,
    InvalidRequestError,
    ModelLoadingError,
    OverloadedError,
    VariableNotFoundError,
    VariableStateError,
)
from parrot_gateway.settings import SessionSettings

PATH = "/v1/completions"


class ScriptedRunner:
    """Answers with the prompt in brackets, word by word; or as a test says."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.running = 0
        self.most_running = 0
        self.act: Callable[[Job, str], Awaitable[None]] = self.echo

    async def run(self, job: Job, body: bytes) -> None:
        """See `CallRunner.run`."""
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.act(job, json.loads(body)["prompt"])
        finally:
            self.running -= 1

    async def echo(self, job: Job, prompt: str) -> None:
        for part in ("(", prompt, ")"):
            job.append(part, 0.0)
            await asyncio.sleep(0)

    async def hang(self, job: Job, prompt: str) -> None:
        await asyncio.get_running_loop().create_future()


def gauges(service: SemanticService) -> dict[str, int]:
    """What must be zero when there is nothing to do."""
    found = service.executor.statistics()._asdict()
    names = ("waiting", "in_line", "running", "held_bytes", "tasks")
    return {name: found[name] for name in names} | {"readers": service.describe()["readers"]}


def check_quiet(service: SemanticService) -> None:
    """Nothing is left over."""
    assert set(gauges(service).values()) == {0}, gauges(service)
    assert service.executor.unfinished.is_empty
    assert service.urgency.num_waited == 0
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
        call_timeout_s=call_timeout_s,
    )
    service.connect(runner)
    try:
        yield service
        async with asyncio.timeout(5):
            await service.drain(5)
    finally:
        await service.close()
    check_quiet(service)
    assert runner.running == 0


def spec(prompt: str, output: Variable | None = None, **fields: object) -> CallSpec:
    body = {"model": "m", "prompt": prompt, **(fields.pop("body", None) or {})}  # type: ignore[dict-item]
    return CallSpec(
        path=PATH,
        body=json.dumps(body).encode(),
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


# -- order ----------------------------------------------------------------------------------


async def test_a_chain_runs_without_anybody_waiting() -> None:
    runner = ScriptedRunner()
    async with service_of(runner) as service:
        session = service.session("t", "s")
        last = submit(service, session, "v0", "start")
        for number in range(1, 5):
            last = submit(service, session, f"v{number}", f"{number} {reference_of(last.id)}")
        assert await service.readers.value(last) == "(4 (3 (2 (1 (start)))))"
        states = [node.state for node in session.graph]
        assert states == ["done"] * 5
        assert all(node.started and node.finished for node in session.graph)


async def test_readers_may_come_before_producers() -> None:
    async with service_of(ScriptedRunner()) as service:
        session = service.session("t", "s")
        inputs = {"x": Binding(variable_id=session.variable("late").id)}
        reader = submit(service, session, "r", "<{{x}}>", inputs=inputs)
        await asyncio.sleep(0)
        assert gauges(service)["waiting"] == 1
        submit(service, session, "late", "p")
        assert await service.readers.value(reader) == "(<(p)>)"


async def test_users_write_inputs_too() -> None:
    async with service_of(ScriptedRunner()) as service:
        session = service.session("t", "s")
        given_ = session.variable("x")
        reader = submit(service, session, "r", reference_of(given_.id) * 2)
        service.set_value(given_, "v")
        assert await service.readers.value(reader) == "(vv)"
        with pytest.raises(VariableStateError):
            service.set_value(given_, "again")


async def test_nobody_writes_what_a_call_will() -> None:
    async with service_of(ScriptedRunner()) as service:
        session = service.session("t", "s")
        output = submit(service, session, "r", reference_of(session.variable("x").id))
        with pytest.raises(DoubleProducerError):
            service.set_value(output, "mine")
        service.set_value(session.variable("x"), "")
        assert await service.readers.value(output) == "()"


async def test_calls_of_one_level_run_side_by_side() -> None:
    runner = ScriptedRunner()
    async with service_of(runner) as service:
        session = service.session("t", "s")
        parts = [submit(service, session, f"p{i}", f"{i}") for i in range(10)]
        prompt = "".join(reference_of(part.id) for part in parts)
        total = submit(service, session, "total", prompt)
        assert (
            await service.readers.value(total) == "(" + "".join(f"({i})" for i in range(10)) + ")"
        )
        assert runner.most_running == 10


async def test_the_line_is_bounded_and_keeps_priorities() -> None:
    runner = ScriptedRunner()
    async with service_of(runner, max_running_calls=2) as service:
        session = service.session("t", "s")
        outputs = [
            submit(service, session, f"p{i}", f"{i}", priority=i % 3, dedupe=False)
            for i in range(9)
        ]
        for output in outputs:
            await service.readers.value(output)
        assert runner.most_running == 2
        prompts = [json.loads(body)["prompt"] for body in runner.bodies]
        assert prompts == ["2", "5", "8", "1", "4", "7", "0", "3", "6"]


async def test_too_many_waiting_are_refused() -> None:
    async with service_of(ScriptedRunner(), max_waiting_calls=2) as service:
        session = service.session("t", "s")
        x = session.variable("x")
        submit(service, session, "a", reference_of(x.id))
        submit(service, session, "b", reference_of(x.id))
        with pytest.raises(OverloadedError, match="max_waiting_calls"):
            submit(service, session, "c", "free")
        service.set_value(x, "go")
        await service.readers.value(session.variable("b"))
        submit(service, session, "d", "free")


async def test_too_much_waiting_text_is_refused() -> None:
    async with service_of(ScriptedRunner(), max_waiting_bytes=500) as service:
        session = service.session("t", "s")
        submit(service, session, "a", "x" * 300)
        with pytest.raises(OverloadedError, match="max_waiting_bytes"):
            submit(service, session, "b", "x" * 300)


# -- refusals at submission -----------------------------------------------------------------


async def test_cycles_are_refused_within_a_session_and_across() -> None:
    async with service_of(ScriptedRunner()) as service:
        one, other = service.session("t", "one"), service.session("t", "other")
        a, b, c = one.variable("a"), other.variable("b"), one.variable("c")
        service.submit(one, spec(reference_of(b.id), a))
        with pytest.raises(CycleError):
            service.submit(other, spec(reference_of(a.id), b))
        service.submit(one, spec(reference_of(a.id), c))
        with pytest.raises(CycleError):
            service.submit(other, spec(reference_of(c.id), b))
        service.set_value(b, "b")
        assert await service.readers.value(c) == "((b))"


async def test_another_tenants_variable_is_unknown() -> None:
    async with service_of(ScriptedRunner()) as service:
        foreign = service.session("u", "s").variable("x")
        own = service.session("t", "s")
        with pytest.raises(VariableNotFoundError):
            service.submit(own, spec(reference_of(foreign.id), own.variable("y")))
        with pytest.raises(VariableNotFoundError):
            service.bind(own, foreign.id)
        service.close_session(service.sessions.find("u", "s"))


async def test_variables_of_other_sessions_of_the_tenant_can_be_read() -> None:
    async with service_of(ScriptedRunner()) as service:
        one, other = service.session("t", "one"), service.session("t", "other")
        source = one.variable("x")
        output = other.variable("y")
        service.submit(other, spec(reference_of(source.id), output))
        assert not one.is_idle, "a session that others wait for was given free"
        service.set_value(source, "v")
        assert await service.readers.value(output) == "(v)"
        assert one.is_idle
        assert other.is_idle


async def test_placeholders_and_declarations_must_match() -> None:
    async with service_of(ScriptedRunner()) as service:
        session = service.session("t", "s")
        binding = {"x": Binding(value="v")}
        with pytest.raises(InvalidRequestError, match="'y'"):
            service.submit(session, spec("{{x}} {{y}}", inputs=binding))
        with pytest.raises(InvalidRequestError, match="'x'"):
            service.submit(session, spec("nothing", inputs=binding))
        assert session.graph.num_unfinished == 0


# -- failures -------------------------------------------------------------------------------


async def test_failures_travel_with_their_cause() -> None:
    runner = ScriptedRunner()

    async def act(job: Job, prompt: str) -> None:
        if prompt == "bad":
            raise InvalidRequestError("too long by far", code="context_length_exceeded")
        await runner.echo(job, prompt)

    runner.act = act
    async with service_of(runner) as service:
        session = service.session("t", "s")
        last = first = submit(service, session, "bad", "bad")
        # Deep enough to overflow the stack, were it passed on by calls within calls.
        for number in range(3000):
            last = submit(service, session, f"v{number}", reference_of(last.id))
        with pytest.raises(DependencyFailedError) as caught:
            await service.readers.value(last)
        assert "too long by far" in caught.value.message
        assert "'bad'" in caught.value.message
        assert last.failure is not None
        assert last.failure.code == "dependency_failed"
        assert last.failure.origin.code == "context_length_exceeded"
        assert last.failure.origin.variable_name == "bad"
        assert last.failure.origin.call_id == first.producer
        assert len(runner.bodies) == 1


async def test_a_reader_of_something_that_failed_before_fails_too() -> None:
    runner = ScriptedRunner()

    async def act(job: Job, prompt: str) -> None:
        raise InvalidRequestError("no")

    runner.act = act
    async with service_of(runner) as service:
        session = service.session("t", "s")
        first = submit(service, session, "a", "x")
        await service.readers.wait(first, 5)
        second = submit(service, session, "b", reference_of(first.id))
        assert second.state == "empty", "it failed before its submitter could know its name"
        with pytest.raises(DependencyFailedError):
            await service.readers.value(second)


async def test_a_call_that_failed_listens_no_more() -> None:
    runner = ScriptedRunner()

    async def act(job: Job, prompt: str) -> None:
        raise InvalidRequestError("no")

    runner.act = act
    async with service_of(runner) as service:
        session = service.session("t", "s")
        never = session.variable("never")
        prompt = reference_of(submit(service, session, "a", "x").id) + reference_of(never.id)
        output = submit(service, session, "b", prompt)
        assert never.num_listeners == 1
        await service.readers.wait(output, 5)
        assert output.state == "failed"
        assert never.num_listeners == 0


async def test_what_breaks_in_a_runner_is_told_without_details() -> None:
    runner = ScriptedRunner()

    async def act(job: Job, prompt: str) -> None:
        raise RuntimeError("secret path")

    runner.act = act
    async with service_of(runner) as service:
        output = submit(service, service.session("t", "s"), "a", "x")
        with pytest.raises(DependencyFailedError) as caught:
            await service.readers.value(output)
        assert "secret" not in caught.value.message


async def test_engines_that_are_away_for_a_moment_are_waited_for() -> None:
    runner = ScriptedRunner()
    tries = iter([True, True, False])

    async def act(job: Job, prompt: str) -> None:
        if next(tries):
            raise ModelLoadingError("not yet", retry_after_s=0.001)
        await runner.echo(job, prompt)

    runner.act = act
    async with service_of(runner) as service:
        output = submit(service, service.session("t", "s"), "a", "x")
        assert await service.readers.value(output) == "(x)"
        assert service.executor.statistics().retries == 2


async def test_calls_that_run_too_long_end() -> None:
    runner = ScriptedRunner()
    runner.act = runner.hang
    async with service_of(runner, call_timeout_s=0.05) as service:
        session = service.session("t", "s")
        output = submit(service, session, "a", "x")
        reader = submit(service, session, "b", reference_of(output.id))
        await service.readers.wait(reader, 5)
        assert reader.failure is not None
        assert reader.failure.origin.code == "timeout"


async def test_waits_for_what_never_comes_end() -> None:
    async with service_of(ScriptedRunner(), ttl_s=0.05) as service:
        session = service.session("t", "s")
        output = submit(service, session, "a", reference_of(session.variable("never").id))
        await service.readers.wait(output, 5)
        assert output.failure is not None
        assert output.failure.code == "timeout"
        assert "'never'" in output.failure.message
        with pytest.raises(DeadlineError):
            await service.readers.value(session.variable("never"), 0.01)


async def test_values_that_grow_too_large_fail_the_call() -> None:
    async with service_of(ScriptedRunner(), max_value_bytes=10) as service:
        session = service.session("t", "s")
        for number, transform in enumerate((None, parse_transform("lower"))):
            output = submit(service, session, f"v{number}", "x" * 20, transform=transform)
            await service.readers.wait(output, 5)
            assert output.failure is not None
            assert output.failure.code == "value_too_large"


# -- cancellation ---------------------------------------------------------------------------


async def test_cancelling_a_call_stops_it_and_fails_its_readers() -> None:
    runner = ScriptedRunner()
    runner.act = runner.hang
    async with service_of(runner) as service:
        session = service.session("t", "s")
        output = submit(service, session, "a", "x")
        reader = submit(service, session, "b", reference_of(output.id))
        await until(lambda: runner.running == 1)
        assert output.producer is not None
        service.cancel_call("t", output.producer)
        await service.readers.wait(reader, 5)
        assert (output.state, reader.state) == ("cancelled", "failed")
        await until(lambda: runner.running == 0)


async def test_closing_a_session_stops_everything_in_it() -> None:
    runner = ScriptedRunner()
    runner.act = runner.hang
    async with service_of(runner) as service:
        session = service.session("t", "s")
        outputs = [submit(service, session, f"v{i}", f"{i}") for i in range(5)]
        submit(service, session, "w", reference_of(session.variable("never").id))
        waiting = asyncio.create_task(service.readers.value(outputs[0]))
        await until(lambda: runner.running == 5)
        service.close_session(session)
        with pytest.raises(DependencyFailedError, match="session was closed"):
            await waiting
        await until(lambda: runner.running == 0)
        assert service.sessions.statistics().sessions == 0
        assert service.sessions.statistics().value_bytes == 0


async def test_closing_the_gateway_stops_everything() -> None:
    runner = ScriptedRunner()
    runner.act = runner.hang
    async with service_of(runner) as service:
        session = service.session("t", "s")
        output = submit(service, session, "v", "x")
        await until(lambda: runner.running == 1)
        assert not await service.drain(0.01)
        await service.close()
        assert output.failure is not None
        assert "shut down" in output.failure.message
        with pytest.raises(GatewayError):
            submit(service, service.session("t", "n"), "v", "x")


async def test_a_cancelled_reader_leaves_no_listener() -> None:
    async with service_of(ScriptedRunner()) as service:
        variable = service.session("t", "s").variable("x")
        task = asyncio.create_task(service.readers.value(variable))
        await until(lambda: variable.num_listeners == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert variable.num_listeners == 0


# -- identical calls ------------------------------------------------------------------------

SEEDED = {"temperature": 0}


async def test_identical_deterministic_calls_run_once() -> None:
    runner = ScriptedRunner()
    async with service_of(runner) as service:
        session = service.session("t", "s")
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


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"body": SEEDED}, {"body": {"temperature": 0, "max_tokens": 3}}),
        ({"body": SEEDED}, {"body": SEEDED, "dedupe": False}),
        ({"body": SEEDED}, {"body": SEEDED, "transform": parse_transform("upper")}),
        ({"body": {"seed": 1}}, {"body": {"seed": 2}}),
    ],
)
async def test_others_run_each(first: dict[str, object], second: dict[str, object]) -> None:
    runner = ScriptedRunner()
    async with service_of(runner) as service:
        session = service.session("t", "s")
        await service.readers.value(submit(service, session, "a", "x", **first))
        await service.readers.value(submit(service, session, "b", "x", **second))
        assert len(runner.bodies) == 2


async def test_other_sessions_do_not_share() -> None:
    runner = ScriptedRunner()
    async with service_of(runner) as service:
        for name in ("one", "other"):
            session = service.session("t", name)
            await service.readers.value(submit(service, session, "a", "x", body=SEEDED))
        assert len(runner.bodies) == 2


async def test_the_twin_of_a_cancelled_call_runs_itself() -> None:
    runner = ScriptedRunner()
    runner.act = runner.hang
    async with service_of(runner) as service:
        session = service.session("t", "s")
        first = submit(service, session, "a", "x", body=SEEDED)
        second = submit(service, session, "b", "x", body=SEEDED)
        await until(lambda: second.state == "running" and runner.running == 1)
        runner.act = runner.echo
        assert first.producer is not None
        service.cancel_call("t", first.producer)
        assert await service.readers.value(second) == "(x)"


async def test_what_failed_once_is_tried_again_when_asked_again() -> None:
    runner = ScriptedRunner()

    async def act(job: Job, prompt: str) -> None:
        raise InvalidRequestError("not now")

    async with service_of(runner) as service:
        session = service.session("t", "s")
        runner.act = act
        first = submit(service, session, "a", "x", body=SEEDED)
        await service.readers.wait(first, 5)
        runner.act = runner.echo
        assert await service.readers.value(submit(service, session, "b", "x", body=SEEDED)) == "(x)"


# -- transforms -----------------------------------------------------------------------------


async def test_outputs_are_transformed_and_grow_only_when_they_are_not() -> None:
    runner = ScriptedRunner()
    seen: dict[str, list[str]] = {"plain": [], "upper": []}
    async with service_of(runner) as service:
        session = service.session("t", "s")
        for name in seen:
            variable = session.variable(name)
            variable.subscribe(lambda v: seen[v.name].append(v.text))
            transform = parse_transform("upper") if name == "upper" else None
            submit(service, session, name, "abc", transform=transform)
        assert await service.readers.value(session.variable("upper")) == "(ABC)"
        assert await service.readers.value(session.variable("plain")) == "(abc)"
    assert seen["upper"] == ["", "(ABC)"]
    assert seen["plain"] == ["", "(", "(abc", "(abc)", "(abc)"]


async def test_a_transform_that_does_not_fit_fails_the_call() -> None:
    async with service_of(ScriptedRunner()) as service:
        session = service.session("t", "s")
        output = submit(service, session, "a", "x", transform=parse_transform("json(/a)"))
        await service.readers.wait(output, 5)
        assert output.failure is not None
        assert output.failure.code == "transform_failed"


async def test_transforms_stand_between_variables_as_nodes() -> None:
    async with service_of(ScriptedRunner()) as service:
        session = service.session("t", "s")
        source, middle = session.variable("a"), session.variable("b")
        service.submit_transform(session, source, parse_transform("upper"), middle)
        last = submit(service, session, "c", reference_of(middle.id))
        submit(service, session, "a", "x")
        assert await service.readers.value(last) == "((X))"
        kinds = {node.kind for node in session.graph}
        assert kinds == {"call", "transform"}


# -- objectives -----------------------------------------------------------------------------


def objectives(session: Session) -> dict[str, Objective]:
    return {node.name: node.objective for node in session.graph if node.kind == "call"}  # type: ignore[attr-defined]


async def test_who_waits_decides_what_a_call_is_for() -> None:
    runner = ScriptedRunner()
    runner.act = runner.hang
    async with service_of(runner) as service:
        session = service.session("t", "s")
        first = submit(service, session, "a", "x")
        last = submit(service, session, "b", reference_of(first.id))
        submit(service, session, "aside", "y")
        await until(lambda: runner.running == 2)
        assert set(objectives(session).values()) == {THROUGHPUT}
        waiting = asyncio.create_task(service.readers.value(last))
        await until(lambda: objectives(session)["b"] == LATENCY)
        assert objectives(session) == {"a": LATENCY, "b": LATENCY, "aside": THROUGHPUT}
        waiting.cancel()
        service.close_session(session)


async def test_a_producer_that_comes_late_inherits_the_wait() -> None:
    runner = ScriptedRunner()
    runner.act = runner.hang
    async with service_of(runner) as service:
        session = service.session("t", "s")
        reader = submit(service, session, "r", reference_of(session.variable("x").id))
        waiting = asyncio.create_task(service.readers.value(reader))
        await until(lambda: objectives(session)["r"] == LATENCY)
        submit(service, session, "x", "late")
        await until(lambda: objectives(session)["x"] == LATENCY)
        waiting.cancel()
        service.close_session(session)


# -- random graphs --------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn, most: int = 200) -> dict[int, list[int]]:
    """By node the nodes whose outputs it reads; smaller numbers only."""
    size = draw(st.integers(1, most))
    seed = draw(st.integers(0, 2**32 - 1))
    chance = random.Random(seed)
    width = draw(st.integers(1, 8))
    return {
        node: sorted(chance.sample(range(node), min(node, chance.randrange(width))))
        for node in range(size)
    }


def expected_values(graph: Mapping[int, list[int]]) -> dict[int, str]:
    """What each node's text is when nothing goes wrong: short, and different for each."""
    values: dict[int, str] = {}
    for node, inputs in graph.items():
        values[node] = short(f"{node}: " + "".join(values[i] for i in inputs))
    return values


def short(prompt: str) -> str:
    """The runner's answer to a prompt."""
    return f"<{abs(hash(prompt)) % 10**12}>"


async def run_graph(
    graph: dict[int, list[int]], order: list[int], failing: set[int], cancelled: set[int]
) -> None:
    """Submit a graph in any order, let some calls fail and cancel others in mid-flight."""
    runner = ScriptedRunner()
    chance = random.Random(len(graph))

    async def act(job: Job, prompt: str) -> None:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if int(prompt.split(":")[0]) in failing:
            raise InvalidRequestError(f"node {prompt.split(':')[0]} fails")
        text = short(prompt)
        job.append(text[:2], 0.0)
        await asyncio.sleep(0)
        job.append(text[2:], 0.0)

    runner.act = act
    async with service_of(runner, max_running_calls=32) as service:
        session = service.session("t", "s")
        outputs = {node: session.variable(f"v{node}") for node in graph}
        for count, node in enumerate(order):
            prompt = f"{node}: " + "".join(reference_of(outputs[i].id) for i in graph[node])
            service.submit(session, spec(prompt, outputs[node]))
            if count % 7 == 0:
                await asyncio.sleep(0)
        for node in sorted(cancelled):
            producer = outputs[node].producer
            assert producer is not None
            service.cancel_call("t", producer)
            await asyncio.sleep(0)
        for node in graph:
            await service.readers.wait(outputs[node], 10)
        check_outcome(graph, outputs, failing, cancelled)
        await service.drain(5)
        check_quiet(service)


def check_outcome(
    graph: Mapping[int, list[int]],
    outputs: Mapping[int, Variable],
    failing: set[int],
    cancelled: set[int],
) -> None:
    expected = expected_values(graph)
    for node, output in outputs.items():
        bad = [i for i in graph[node] if outputs[i].state != "ready"]
        if output.state == "ready":
            assert not bad
            assert node not in failing
            assert output.value == expected[node]
            continue
        failure = output.failure
        assert failure is not None
        assert bad or node in failing or node in cancelled, f"node {node} ended without a reason"
        origin = int((failure.origin.variable_name or "v-1")[1:])
        assert origin in failing | cancelled
        if output.state == "cancelled":
            assert node in cancelled


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_graphs_end_right(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    order = data.draw(st.permutations(range(len(graph))))
    nodes = st.sets(st.integers(0, len(graph) - 1), max_size=5)
    failing, cancelled = data.draw(nodes), data.draw(nodes)
    asyncio.run(run_graph(graph, list(order), failing, cancelled))


@pytest.mark.parametrize(("failing", "cancelled"), [(0, 0), (3, 3)])
def test_a_thousand_calls(failing: int, cancelled: int) -> None:
    chance = random.Random(7)
    graph = {n: sorted(chance.sample(range(n), min(n, chance.randrange(5)))) for n in range(1000)}
    order = list(graph)
    chance.shuffle(order)
    bad = chance.sample(range(500, 1000), failing + cancelled)
    asyncio.run(run_graph(graph, order, set(bad[:failing]), set(bad[failing:])))


def test_the_check_of_outcomes_finds_a_wrong_value() -> None:
    """The check itself can fail."""
    graph: dict[int, list[int]] = {0: []}
    variable = Variable("i", "v0", "s", max_value_bytes=100)
    variable.set("wrong")
    with pytest.raises(AssertionError):
        check_outcome(graph, {0: variable}, set(), set())
