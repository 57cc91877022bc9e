"""Calls of several outputs: what they write, and what is left when they are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from harness.gateway.scripted_runner import ScriptedRunner, session_of
from parrot_scheduler.task import LATENCY

from parrot_gateway.exceptions import (
    CycleError,
    DoubleProducerError,
    GatewayError,
    InvalidRequestError,
    RequestTooLargeError,
    VariableNotFoundError,
)
from parrot_gateway.semantic.call_chain import ChainParameter, ChainSpec, submit_chain
from parrot_gateway.telemetry.call_record import CallRecord

IN, OUT = ({"is_output": is_output} for is_output in (False, True))


def chain(template: str, *parameters: dict[str, Any], **fields: Any) -> ChainSpec:
    given = [ChainParameter(**each) for each in parameters]
    return ChainSpec(
        template=template, parameters=given, model="m", **{"max_characters": 1000, **fields}
    )


async def test_outputs_are_written_one_after_the_other() -> None:
    runner, records = ScriptedRunner(), list[CallRecord]()
    async with session_of(runner) as (service, session):
        taken = session.variable("one")
        who = session.variable("who")
        spec = chain(
            "For {{who}} of {{what}}: {{one}} and {{two}}.",
            {"name": "two", "fields": {"temperature": 0.5}, **OUT},
            {"name": "one", "fields": {"max_tokens": 3}, **OUT},
            {"name": "who", "variable_id": who.id, **IN},
            {"name": "what", "value": "kind", **IN},
            name="tale", objective=LATENCY, begin_record=records.append,
        )  # fmt: skip
        two, one, same, what = await submit_chain(service, session, spec)
        assert same is who
        assert (what.name, what.value, two.name) == ("what", "kind", "two")
        # A name that is taken is the beginning of another one.
        assert one is not taken
        assert one.name.startswith("one")
        assert one.name != "one"
        assert [(node.name, node.objective) for node in session.graph] == [  # type: ignore[attr-defined]
            ("tale.one", LATENCY), ("tale.two", LATENCY)
        ]  # fmt: skip
        assert len(records) == 2
        service.set_value(who, "Ada")
        assert await service.readers.value(two) == "(For Ada of kind: (For Ada of kind: ) and )"
        bodies = [msgspec.json.decode(body) for body in runner.bodies]
        assert bodies == [
            {"model": "m", "max_tokens": 3, "prompt": "For Ada of kind: "},
            {"model": "m", "temperature": 0.5,
             "prompt": "For Ada of kind: (For Ada of kind: ) and "},
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "parameters", "error", "param"),
    [
        ("a {{o}} {{p}}", [{"name": "o", "variable_id": "ready", **OUT}], DoubleProducerError,
         "parameters.var_id"),
        ("a {{o}}", [{"name": "o", "variable_id": "written", "param": "p[0]", **OUT}],
         DoubleProducerError, "p[0].var_id"),
        ("a {{o}} {{p}}", [{"name": "o", "variable_id": "empty", **OUT},
                           {"name": "p", "variable_id": "empty", **OUT}], DoubleProducerError,
         "parameters.var_id"),
        ("a {{i}} {{o}}", [{"name": "i", "variable_id": "none", **IN}, {"name": "o", **OUT}],
         VariableNotFoundError, "parameters.var_id"),
        ("a {{o}} {{i}} {{p}}", [{"name": "i", "variable_id": "empty", **IN}, {"name": "o", **OUT},
                                 {"name": "p", "variable_id": "empty", **OUT}], CycleError, None),
        ("a" * 400 + "{{o}} {{p}} {{q}}", [{"name": each, **OUT} for each in "opq"],
         RequestTooLargeError, "template"),
        ("{{o}}", [{"name": "o", **OUT}], InvalidRequestError, "template"),
    ],
)  # fmt: skip
async def test_a_chain_that_is_refused_leaves_nothing(
    template: str, parameters: list[dict[str, Any]], error: type[GatewayError], param: str | None
) -> None:
    runner = ScriptedRunner.hanging()
    async with session_of(runner) as (service, session):
        made = {name: session.variable(name) for name in ("ready", "written", "empty")}
        made["ready"].set("ready")
        await submit_chain(
            service,
            session,
            chain("b {{x}}", {"name": "x", "variable_id": made["written"].id, **OUT}),
        )
        before = {variable.name for variable in session}
        ids = {name: variable.id for name, variable in made.items()}
        named = [
            {**each, "variable_id": ids.get(each["variable_id"], "var_none")}
            if "variable_id" in each
            else each
            for each in parameters
        ]
        with pytest.raises(error) as refused:
            await submit_chain(service, session, chain(template, *named))
        if param is not None:
            assert refused.value.param == param
        assert {variable.name for variable in session} == before
        assert session.graph.num_unfinished == 1
        assert made["empty"].producer is None or made["empty"].is_final
        service.close_session(session)
