"""Calls of Parrot's own API, with several outputs in one template, as chains of ordinary calls.

A template with several outputs becomes a chain of calls, one per output, whose prompt is the
template up to it: earlier outputs are inputs of later calls (docs/decisions/012). `steps_of` and
`request_of` are pure; `submit_chain` makes the variables and submits the calls, all or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from parrot_scheduler.task import LATENCY, THROUGHPUT, Objective

from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.exceptions import (
    ConflictError,
    DoubleProducerError,
    InvalidRequestError,
    RequestTooLargeError,
)
from parrot_gateway.semantic.call_spec import CallSpec, parse_objective
from parrot_gateway.semantic.execution.job import Job, template_of
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.templates.body_template import read_template
from parrot_gateway.semantic.templates.text_template import (
    Binding,
    Placeholder,
    is_placeholder_name,
    parse_placeholders,
    undeclared_placeholders,
)
from parrot_gateway.semantic.variable import Variable
from parrot_gateway.telemetry.call_record import CallRecord

#: A prompt is one text, or messages of a user and an assistant.
Form: TypeAlias = Literal["text", "messages"]

#: Maximum outputs of one call.
MAX_OUTPUTS = 64

#: Objective for the original API's criteria, which have no time.
TTFT = Objective("ttft", 0.5)
TPOT = Objective("tpot", 0.05)
_CRITERIA = {"latency": LATENCY, "throughput": THROUGHPUT, "ttft": TTFT, "tpot": TPOT}


class OutputStep(NamedTuple):
    """The generation of one output."""

    output: str
    #: The template up to the output, as alternating texts and outputs; a text may have placeholders
    #: of inputs and earlier outputs.
    before: tuple[str | Placeholder, ...]
    #: Parameters that `before` reads, in order of first use.
    reads: tuple[str, ...]

    @property
    def size(self) -> int:
        """Return the characters of the template up to this output."""
        return sum(
            len(part) if isinstance(part, str) else len(part.name) + 4 for part in self.before
        )


def objective_of(criteria: str | None, param: str) -> Objective | None:
    """Read "latency", "throughput", "TTFT" or "TPOT", in any case, or as `parse_objective`."""
    if criteria is None:
        return None
    known = _CRITERIA.get(criteria.strip().lower())
    return known if known is not None else parse_objective(criteria, param)


def steps_of(template: str, inputs: Collection[str], outputs: Collection[str]) -> list[OutputStep]:
    """Return the generations of a template in order.

    An output is generated at its first place and read at later ones. Text after the last output is
    dropped. `{{other}}` is ordinary text, but if an input has no place it is taken for a typo and
    refused.

    Args:
        inputs, outputs: names of the declared parameters.

    Raises:
        InvalidRequestError: a name that is no placeholder, an output without a place or without
            text before it, no output or too many.
    """
    for name in (*inputs, *outputs):
        if not is_placeholder_name(name):
            raise _invalid(
                f"'{name[:64]}' cannot be the name of a parameter: letters, digits and '_', and "
                "no digit first.",
                "parameters",
            )
    if not 1 <= len(outputs) <= MAX_OUTPUTS:
        raise _invalid(
            f"A call has 1 to {MAX_OUTPUTS} outputs (parameters with 'is_output': true), not "
            f"{len(outputs)}.",
            "parameters",
        )
    steps: list[OutputStep] = []
    before: list[str | Placeholder] = []
    #: Parts of the text since the last output.
    text: list[str] = []
    reads: dict[str, None] = {}
    generated: set[str] = set()
    for piece in parse_placeholders(template, {*inputs, *outputs}):
        if not isinstance(piece, Placeholder):
            text.append(piece)
        elif piece.name in outputs and piece.name not in generated:
            if text:
                before.append("".join(text))
                text.clear()
            if not before:
                raise _invalid(
                    f"The template begins with the output '{piece.name}': a model needs a text "
                    "to continue.",
                    "template",
                )
            steps.append(OutputStep(piece.name, tuple(before), tuple(reads)))
            generated.add(piece.name)
            reads[piece.name] = None
            before.append(piece)
        else:
            reads[piece.name] = None
            text.append(_written(piece))
    for name in outputs:
        if name not in generated:
            raise _invalid(f"The output '{name}' has no place {{{{{name}}}}} in it.", "template")
    _check_spelling(template, inputs, outputs, reads)
    return steps


def _check_spelling(
    template: str, inputs: Collection[str], outputs: Collection[str], reads: Collection[str]
) -> None:
    unused = [name for name in inputs if name not in reads]
    undeclared = undeclared_placeholders(template, {*inputs, *outputs}) if unused else set()
    if undeclared:
        raise InvalidRequestError(
            f"The template has the placeholder '{min(undeclared)}', which 'parameters' does not "
            f"declare, but none for the input '{unused[0]}'.",
            param="template",
            code="undeclared_placeholder",
        )


def request_of(step: OutputStep, form: Form, fields: Mapping[str, Any]) -> CallRequest:
    """Build the ordinary call, with placeholders `{{name}}` for all that `step` reads.

    Args:
        form: in messages, texts are the user's and outputs the assistant's.
        fields: model and sampling.
    """
    if form == "text":
        prompt = "".join(_written(part) for part in step.before)
        return CallRequest("completions", msgspec.json.encode({**fields, "prompt": prompt}))
    messages = [
        {"role": role, "content": "".join(map(_written, parts))}
        for role, parts in groupby(step.before, key=_role_of)
    ]
    return CallRequest("chat", msgspec.json.encode({**fields, "messages": messages}))


def _role_of(part: str | Placeholder) -> str:
    return "user" if isinstance(part, str) else "assistant"


def _written(part: str | Placeholder) -> str:
    return part if isinstance(part, str) else f"{{{{{part.name}}}}}"


def _invalid(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="invalid_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainParameter:
    """One placeholder of a template.

    An input has a variable or a value. An output may have a variable, which the call then writes.
    """

    name: str
    is_output: bool = False
    variable_id: str | None = None
    value: str | None = None
    #: For an output: sampling and length, as fields of an ordinary call.
    fields: Mapping[str, Any] = field(default_factory=dict)
    #: Its name in errors.
    param: str = "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSpec:
    """A call with any number of outputs."""

    template: str
    parameters: Sequence[ChainParameter]
    model: str
    form: Form = "text"
    objective: Objective | None = None
    #: Label in pictures of the graph.
    name: str = ""
    #: See `CallSpec.headers`.
    headers: Sequence[tuple[bytes, bytes]] = ()
    #: Limit of the prompts of all outputs together, without values.
    max_characters: int
    #: Called with each call's record, which ends with the call.
    begin_record: Callable[[CallRecord], None] = lambda record: None


def new_variable(session: Session, name: str, param: str) -> Variable:
    """Create a variable of that name or, if it is taken, with that prefix; raises like
    `variable`.
    """
    if session.find(name) is not None:
        return session.anonymous_variable(name.strip())
    return session.variable(name, param)


async def submit_chain(
    service: SemanticService, session: Session, spec: ChainSpec
) -> list[Variable]:
    """Submit a call that runs as its inputs become ready.

    After an error or a cancellation none of its calls runs, and no variable made for it is left.

    Returns:
        the variable of each parameter, in order.

    Raises:
        InvalidRequestError: of the template, see `steps_of`.
        RequestTooLargeError: the prompts are longer than `max_characters`.
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
        templates = await read_template(lambda: [template_of(call) for call in calls], size)
        for call, template in zip(calls, templates, strict=True):
            job = service.submit(session, call, template=template)
            spec.begin_record(job.record)
            jobs.append(job)
    except BaseException:
        _undo(service, session, jobs, made)
        raise
    return list(variables.values())


def _bound(session: Session, parameters: Sequence[ChainParameter]) -> dict[str, Variable]:
    """Return the existing variables of the parameters; outputs among them must have no producer."""
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
        # Nothing else can depend on it, because its id was never given out.
        with suppress(ConflictError):
            session.delete(variable.id)
