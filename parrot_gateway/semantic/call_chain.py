"""Submits a call of Parrot's own API: its variables, and the chain of calls that writes them.

All or nothing: after an error none of its calls runs and no variable of its own is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from parrot_scheduler.task import Objective

from parrot_gateway.exceptions import ConflictError, DoubleProducerError, RequestTooLargeError
from parrot_gateway.semantic.call_spec import CallSpec
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.execution.job_maker import template_of
from parrot_gateway.semantic.semantic_call import Form, OutputStep, request_of, steps_of
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.templates.body_template import Binding, read_aside
from parrot_gateway.semantic.variable import Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainParameter:
    """One placeholder of a template.

    An input has a variable or a value; an output may have a variable, which is then written.
    """

    name: str
    is_output: bool = False
    variable_id: str | None = None
    value: str | None = None
    #: Of an output: sampling and length, as fields of an ordinary call.
    fields: Mapping[str, Any] = field(default_factory=dict)
    #: What errors call it.
    param: str = "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSpec:
    """A call with any number of outputs."""

    template: str
    parameters: Sequence[ChainParameter]
    model: str
    form: Form = "text"
    objective: Objective | None = None
    #: What pictures call it.
    name: str = ""
    #: See `CallSpec.headers`.
    headers: Sequence[tuple[bytes, bytes]] = ()
    #: What the prompts of all outputs may come to, before values are put in.
    max_characters: int


def new_variable(session: Session, name: str, param: str) -> Variable:
    """A variable that was not there: of that name, or, if it is taken, of one that begins so.

    Raises:
        InvalidRequestError, SessionFullError, SessionNotFoundError: as `Session.variable`.
    """
    if session.find(name) is not None:
        return session.anonymous_variable(name.strip())
    return session.variable(name, param)


async def submit_chain(
    service: SemanticService, session: Session, spec: ChainSpec
) -> list[Variable]:
    """Submit a call; it runs as its inputs become ready. A cancelled wait submits nothing.

    Returns:
        the variable of each parameter, in order.

    Raises:
        InvalidRequestError: of the template, see `steps_of`.
        RequestTooLargeError: the outputs' prompts come to too much.
        VariableNotFoundError: a variable is not in this session.
        CycleError, DoubleProducerError, SessionFullError, ValueTooLargeError, OverloadedError:
            as `SemanticService.submit` and `set_value`.
    """
    steps = steps_of(
        spec.template,
        [item.name for item in spec.parameters if not item.is_output],
        [item.name for item in spec.parameters if item.is_output],
    )
    if sum(step.size for step in steps) > spec.max_characters:
        raise RequestTooLargeError(
            f"The prompts of the {len(steps)} outputs, each of which has the template up to it, "
            f"come to more than {spec.max_characters} characters (setting server.max_body_bytes).",
            param="template",
        )
    bound = _bound(session, spec.parameters)
    made: list[Variable] = []
    jobs: list[Job] = []
    variables: dict[str, Variable] = {}
    try:
        for parameter in spec.parameters:
            variable = bound.get(parameter.name)
            if variable is None:
                variable = new_variable(session, parameter.name, parameter.param)
                made.append(variable)
                if parameter.value is not None:
                    service.set_value(variable, parameter.value)
            variables[parameter.name] = variable
        fields = {item.name: item.fields for item in spec.parameters}
        calls = [_call(spec, step, fields[step.output], variables) for step in steps]
        size = sum(call.size_bytes for call in calls)
        templates = await read_aside(lambda: [template_of(call) for call in calls], size)
        for call, template in zip(calls, templates, strict=True):
            jobs.append(service.submit(session, call, template=template))
    except BaseException:
        _undo(service, session, jobs, made)
        raise
    return list(variables.values())


def _bound(session: Session, parameters: Sequence[ChainParameter]) -> dict[str, Variable]:
    """The variables that are there already; outputs among them have no producer yet."""
    bound: dict[str, Variable] = {}
    outputs: set[str] = set()
    for parameter in parameters:
        if parameter.variable_id is None:
            continue
        param = f"{parameter.param}.var_id"
        variable = session.lookup(parameter.variable_id, param)
        bound[parameter.name] = variable
        if parameter.is_output:
            if variable.id in outputs:
                raise DoubleProducerError(variable.name, "another output of it", param=param)
            if variable.producer is not None or variable.state != "empty":
                writer = f"call '{variable.producer}'" if variable.producer else "its user"
                raise DoubleProducerError(variable.name, writer, param=param)
            outputs.add(variable.id)
    return bound


def _call(
    spec: ChainSpec, step: OutputStep, fields: Mapping[str, Any], variables: Mapping[str, Variable]
) -> CallSpec:
    return CallSpec(
        request=request_of(step, spec.form, {"model": spec.model, **fields}),
        inputs={name: Binding(variable_id=variables[name].id) for name in step.reads},
        verbatim=True,
        output=variables[step.output].id,
        objective=spec.objective,
        name=f"{spec.name}.{step.output}" if spec.name else step.output,
        headers=spec.headers,
    )


def _undo(
    service: SemanticService, session: Session, jobs: Sequence[Job], made: Sequence[Variable]
) -> None:
    for job in reversed(jobs):
        service.executor.cancel(job, "another output of the same call could not be submitted")
    for variable in made:
        # Somebody else's call may have come to wait for it only if its id was known: it was not.
        with suppress(ConflictError):
            session.delete(variable.id)
