"""The executor on a scripted runner: order, failures that travel, nothing left over."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref

import pytest
from harness.gateway.scripted_runner import (
    ScriptedRunner,
    gauges,
    service_of,
    session_of,
    spec,
    submit,
)
from harness.waiting import until

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
from parrot_gateway.semantic import variable as variable_module
from parrot_gateway.semantic.contexts import ContextName
from parrot_gateway.semantic.execution import executor as executor_module
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.semantic.templates.reference import reference_of
from parrot_gateway.semantic.templates.text_template import Binding
from parrot_gateway.semantic.transforms.transform import parse_transform

# -- order ----------------------------------------------------------------------------------


async def test_a_chain_runs_without_anybody_waiting() -> None:
    runner = ScriptedRunner()
    async with session_of(runner) as (service, session):
        last = submit(service, session, "v0", "start")
        for number in range(1, 5):
            last = submit(service, session, f"v{number}", f"{number} {reference_of(last.id)}")
        assert await service.readers.value(last) == "(4 (3 (2 (1 (start)))))"
        states = [node.state for node in session.graph]
        assert states == ["done"] * 5
        assert all(node.started and node.finished for node in session.graph)


async def test_readers_may_come_before_producers() -> None:
    async with session_of(ScriptedRunner()) as (service, session):
        inputs = {"x": Binding(variable_id=session.variable("late").id)}
        reader = submit(service, session, "r", "<{{x}}>", inputs=inputs)
        await asyncio.sleep(0)
        assert gauges(service)["waiting"] == 1
        submit(service, session, "late", "p")
        assert await service.readers.value(reader) == "(<(p)>)"


async def test_users_write_inputs_too() -> None:
    async with session_of(ScriptedRunner()) as (service, session):
        given_ = session.variable("x")
        reader = submit(service, session, "r", reference_of(given_.id) * 2)
        service.set_value(given_, "v")
        assert await service.readers.value(reader) == "(vv)"
        with pytest.raises(VariableStateError):
            service.set_value(given_, "again")


async def test_nobody_writes_what_a_call_will() -> None:
    async with session_of(ScriptedRunner()) as (service, session):
        output = submit(service, session, "r", reference_of(session.variable("x").id))
        with pytest.raises(DoubleProducerError):
            service.set_value(output, "mine")
        service.set_value(session.variable("x"), "")
        assert await service.readers.value(output) == "()"


async def test_calls_of_one_level_run_side_by_side() -> None:
    runner = ScriptedRunner()
    async with session_of(runner) as (service, session):
        parts = [submit(service, session, f"p{i}", f"{i}") for i in range(10)]
        prompt = "".join(reference_of(part.id) for part in parts)
        total = submit(service, session, "total", prompt)
        assert (
            await service.readers.value(total) == "(" + "".join(f"({i})" for i in range(10)) + ")"
        )
        assert runner.most_running == 10


async def test_the_line_is_bounded_and_keeps_priorities() -> None:
    runner = ScriptedRunner()
    async with session_of(runner, max_running_calls=2) as (service, session):
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
    async with session_of(ScriptedRunner(), max_waiting_calls=2) as (service, session):
        x = session.variable("x")
        submit(service, session, "a", reference_of(x.id))
        submit(service, session, "b", reference_of(x.id))
        with pytest.raises(OverloadedError, match="max_waiting_calls"):
            submit(service, session, "c", "free")
        service.set_value(x, "go")
        await service.readers.value(session.variable("b"))
        submit(service, session, "d", "free")


async def test_too_much_waiting_text_is_refused() -> None:
    async with session_of(ScriptedRunner(), max_waiting_bytes=500) as (service, session):
        submit(service, session, "a", "x" * 300)
        with pytest.raises(OverloadedError, match="max_waiting_bytes"):
            submit(service, session, "b", "x" * 300)


async def test_calls_that_end_in_line_leave_it() -> None:
    runner = ScriptedRunner.hanging()
    async with session_of(runner, max_running_calls=1) as (service, session):
        outputs = [submit(service, session, f"p{i}", f"{i}") for i in range(300)]
        await until(lambda: runner.running == 1)
        for output in outputs[1:]:
            assert output.producer is not None
            service.cancel_call("t", output.producer)
        assert service.executor.deferred < 100
        service.close_session(session)


async def test_times_and_tokens_are_noted() -> None:
    runner = ScriptedRunner()

    async def act(job: Job, prompt: str) -> None:
        for now in (1.0, 2.0, 3.0):
            job.append("x", now)

    runner.act = act
    async with session_of(runner) as (service, session):
        output = submit(service, session, "a", "x")
        assert await service.readers.value(output) == "xxx"
        node = session.graph.get(output.producer or "")
        assert isinstance(node, CallNode)
        assert (node.first_token, node.tokens) == (1.0, 3)


async def test_bytes_may_wait_up_to_the_bound() -> None:
    limit = 1000
    async with session_of(ScriptedRunner(), max_waiting_bytes=limit) as (service, session):
        submit(service, session, "a", "")
        room = limit - service.executor.statistics().held_bytes
        empty = limit - room
        with pytest.raises(OverloadedError, match="max_waiting_bytes"):
            submit(service, session, "b", "x" * (room - empty + 1))
        submit(service, session, "c", "x" * (room - empty))
        assert service.executor.statistics().held_bytes == limit


async def test_a_call_that_cancels_itself_is_not_cut_short() -> None:
    runner = ScriptedRunner()
    went_on = asyncio.Event()

    async def act(job: Job, prompt: str) -> None:
        service.executor.cancel(job)
        await asyncio.sleep(0)
        went_on.set()

    runner.act = act
    async with service_of(runner) as service:
        output = submit(service, service.session("t", "s"), "a", "x")
        await service.readers.wait(output, 5)
        await service.executor.drain(5)
        assert output.state == "cancelled"
        assert went_on.is_set()


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
            service.variable(own, foreign.id)
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


async def test_a_variable_that_too_many_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variable_module, "MAX_LISTENERS", 1)
    async with session_of(ScriptedRunner()) as (service, session):
        free, taken = session.variable("free"), session.variable("taken")
        first = submit(service, session, "a", reference_of(taken.id))
        with pytest.raises(OverloadedError):
            submit(service, session, "b", reference_of(free.id) + reference_of(taken.id))
        assert session.variable("b").state == "failed"
        assert (free.num_listeners, gauges(service)["waiting"]) == (0, 1)
        service.set_value(taken, "v")
        assert await service.readers.value(first) == "(v)"


async def test_placeholders_and_declarations_must_match() -> None:
    async with session_of(ScriptedRunner()) as (service, session):
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
    async with session_of(runner) as (service, session):
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
    runner = ScriptedRunner.failing(InvalidRequestError("no"))
    async with session_of(runner) as (service, session):
        first = submit(service, session, "a", "x")
        await service.readers.wait(first, 5)
        second = submit(service, session, "b", reference_of(first.id))
        assert second.state == "empty", "it failed before its submitter could know its name"
        with pytest.raises(DependencyFailedError):
            await service.readers.value(second)


async def test_a_call_that_failed_listens_no_more() -> None:
    runner = ScriptedRunner.failing(InvalidRequestError("no"))
    async with session_of(runner) as (service, session):
        never = session.variable("never")
        prompt = reference_of(submit(service, session, "a", "x").id) + reference_of(never.id)
        output = submit(service, session, "b", prompt)
        assert never.num_listeners == 1
        await service.readers.wait(output, 5)
        assert output.state == "failed"
        assert never.num_listeners == 0


async def test_what_breaks_in_a_runner_is_told_without_details() -> None:
    runner = ScriptedRunner.failing(RuntimeError("secret path"))
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


async def test_waits_for_engines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "MAX_RETRY_S", 0.001)
    runner = ScriptedRunner.failing(ModelLoadingError("come back tomorrow", retry_after_s=86_400))
    async with service_of(runner, call_timeout_s=10) as service:
        output = submit(service, service.session("t", "s"), "a", "x")
        with pytest.raises(DependencyFailedError, match="come back tomorrow"):
            await service.readers.value(output)
        assert len(runner.bodies) == executor_module.MAX_TRIES
        assert service.executor.statistics().retries == executor_module.MAX_TRIES - 1


async def test_a_call_that_has_text_is_not_tried_again() -> None:
    runner = ScriptedRunner.failing(
        ModelLoadingError("away again", retry_after_s=0.001), "half of "
    )
    async with service_of(runner) as service:
        output = submit(service, service.session("t", "s"), "a", "x")
        with pytest.raises(DependencyFailedError, match="away again"):
            await service.readers.value(output)
        assert len(runner.bodies) == 1
        assert service.executor.statistics().retries == 0


async def test_calls_that_run_too_long_end() -> None:
    runner = ScriptedRunner.hanging()
    async with session_of(runner, call_timeout_s=0.05) as (service, session):
        output = submit(service, session, "a", "x")
        reader = submit(service, session, "b", reference_of(output.id))
        await service.readers.wait(reader, 5)
        assert reader.failure is not None
        assert reader.failure.origin.code == "timeout"


async def test_waits_for_what_never_comes_end() -> None:
    async with session_of(ScriptedRunner(), ttl_s=0.05) as (service, session):
        output = submit(service, session, "a", reference_of(session.variable("never").id))
        await service.readers.wait(output, 5)
        assert output.failure is not None
        assert output.failure.code == "timeout"
        assert "'never'" in output.failure.message
        with pytest.raises(DeadlineError):
            await service.readers.value(session.variable("never"), 0.01)


async def test_values_that_grow_too_large_fail_the_call() -> None:
    async with session_of(ScriptedRunner(), max_value_bytes=10) as (service, session):
        for number, transform in enumerate((None, parse_transform("lower"))):
            output = submit(service, session, f"v{number}", "x" * 20, transform=transform)
            await service.readers.wait(output, 5)
            assert output.failure is not None
            assert output.failure.code == "value_too_large"


# -- cancellation ---------------------------------------------------------------------------


async def test_cancelling_a_call_stops_it_and_fails_its_readers() -> None:
    runner = ScriptedRunner.hanging()
    async with session_of(runner) as (service, session):
        output = submit(service, session, "a", "x")
        reader = submit(service, session, "b", reference_of(output.id))
        await until(lambda: runner.running == 1)
        assert output.producer is not None
        service.cancel_call("t", output.producer)
        await service.readers.wait(reader, 5)
        assert (output.state, reader.state) == ("cancelled", "failed")
        await until(lambda: runner.running == 0)


async def test_closing_a_session_stops_everything_in_it() -> None:
    runner = ScriptedRunner.hanging()
    async with session_of(runner) as (service, session):
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
    runner = ScriptedRunner.hanging()
    async with session_of(runner) as (service, session):
        output = submit(service, session, "v", "x")
        await until(lambda: runner.running == 1)
        assert not await service.executor.drain(0.01)
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


@pytest.mark.parametrize("end", ["cancelled", "refused", "done"])
async def test_a_call_that_has_ended_is_not_held_until_its_time_is_up(end: str) -> None:
    async with session_of(ScriptedRunner(), ttl_s=3600) as (service, session):
        given_ = session.variable("x")
        output = submit(service, session, "a", reference_of(given_.id))
        (job,) = map(weakref.ref, service.executor.unfinished)
        assert output.producer is not None
        if end == "cancelled":
            service.cancel_call("t", output.producer)
        elif end == "refused":
            service.close_session(session)
        else:
            service.set_value(given_, "v")
            await service.readers.value(output)
        await service.executor.drain(5)
        gc.collect()
        assert job() is None


# -- named contexts -------------------------------------------------------------------------


async def test_a_value_that_cannot_be_set_leaves_the_context_as_it_was() -> None:
    runner = ScriptedRunner()
    async with session_of(runner, max_value_bytes=12) as (service, session):
        context = ContextName("chat")
        await service.readers.value(submit(service, session, "a", "1", context=context))
        held = session.value_bytes
        # As many characters as there may be bytes.
        grown = parse_transform("template('éééé{{value}}')")
        output = submit(service, session, "b", "2", context=context, transform=grown)
        await service.readers.wait(output, 5)
        assert output.failure is not None
        assert output.failure.code == "value_too_large"
        assert session.value_bytes == held
        await service.readers.value(submit(service, session, "c", "3", context=context))
        prompts = [json.loads(body)["prompt"] for body in runner.bodies]
        assert prompts == ["1", "1(1)2", "1(1)3"]


# -- transforms -----------------------------------------------------------------------------


async def test_outputs_are_transformed_and_grow_only_when_they_are_not() -> None:
    runner = ScriptedRunner()
    seen: dict[str, list[str]] = {"plain": [], "upper": []}
    async with session_of(runner) as (service, session):
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
    async with session_of(ScriptedRunner()) as (service, session):
        output = submit(service, session, "a", "x", transform=parse_transform("json(/a)"))
        await service.readers.wait(output, 5)
        assert output.failure is not None
        assert output.failure.code == "transform_failed"


async def test_what_a_transform_is_given_may_be_as_long_as_a_value() -> None:
    async with session_of(ScriptedRunner(), max_value_bytes=6) as (service, session):
        fits = submit(service, session, "a", "XXXX", transform=parse_transform("lower"))
        assert await service.readers.value(fits) == "(xxxx)"
        longer = submit(service, session, "b", "XXXXX", transform=parse_transform("take(0)"))
        await service.readers.wait(longer, 5)
        assert longer.failure is not None
        assert longer.failure.code == "value_too_large"


async def test_transforms_stand_between_variables_as_nodes() -> None:
    async with session_of(ScriptedRunner()) as (service, session):
        source, middle = session.variable("a"), session.variable("b")
        service.submit_transform(session, source, parse_transform("upper"), middle)
        last = submit(service, session, "c", reference_of(middle.id))
        submit(service, session, "a", "x")
        assert await service.readers.value(last) == "((X))"
        kinds = {node.kind for node in session.graph}
        assert kinds == {"call", "transform"}
