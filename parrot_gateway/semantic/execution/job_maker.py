"""Makes jobs of what is submitted: checks it, finds its variables, names its place in the graph."""

from __future__ import annotations

import secrets

from parrot_scheduler.task import THROUGHPUT

from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.semantic.call_spec import CallSpec
from parrot_gateway.semantic.contexts import enter
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.graph.node import CallNode, ForeignInput, TransformNode
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.sessions import SessionStore
from parrot_gateway.semantic.templates.body_template import BodyTemplate
from parrot_gateway.semantic.transforms.transform import Transform
from parrot_gateway.semantic.variable import Variable


def _mint_call_id() -> str:
    """An unguessable id."""
    return "call_" + secrets.token_hex(12)


def template_of(spec: CallSpec) -> BodyTemplate:
    """The body of a call to a model as a template.

    Raises:
        InvalidRequestError: it is no JSON object.
    """
    assert spec.request is not None
    return BodyTemplate.of_call(spec.request, spec.inputs, verbatim=spec.verbatim)


def job_of_call(
    spec: CallSpec,
    session: Session,
    sessions: SessionStore,
    now: float,
    *,
    attended: bool,
    template: BodyTemplate | None = None,
) -> Job:
    """The job of a call to a model, which stands in line for its context already.

    Args:
        template: as `template_of` gives it, where that was done before.

    Raises:
        InvalidRequestError: the body is no JSON object; a placeholder is not declared, or a
            declared one does not occur.
        VariableNotFoundError: a reference is unknown, expired or foreign.
        GatewayError: it cannot go on from its context, see `contexts.enter`.
    """
    assert spec.request is not None
    if template is None:
        template = template_of(spec)
    if not spec.verbatim:
        _check_placeholders(template)
    inputs = sessions.variables(session.tenant, template.variables, now)
    foreign = {
        variable_id: owner
        for variable_id, variable in inputs.items()
        if variable.session_id != session.id and (owner := sessions.owner_of(variable)) is not None
    }
    output = None if spec.output is None else session.lookup(spec.output, "output")
    node = CallNode(
        id=_mint_call_id(),
        session_id=session.id,
        inputs=tuple(v for v in inputs if v not in foreign),
        foreign=tuple(
            ForeignInput(variable_id, inputs[variable_id].name, owner.name)
            for variable_id, owner in foreign.items()
        ),
        output=spec.output,
        name=spec.name or (output.name if output is not None else ""),
        submitted=now,
        model=spec.request.semantic_head.model or "",
        given_objective=spec.objective,
        objective=spec.objective or THROUGHPUT,
        priority=spec.priority,
        run=spec.run,
        parent=spec.parent,
        group=spec.group,
    )
    context = None
    if spec.context is not None:
        context = enter(session, spec.context, spec.request)
    return Job(
        node,
        session,
        spec,
        template,
        inputs=inputs,
        foreign=foreign,
        output=output,
        attended=attended,
        context=context,
    )


def job_of_transform(
    source: Variable,
    transform: Transform,
    output: Variable,
    session: Session,
    now: float,
    name: str,
) -> Job:
    """The job that lets `output` take what `transform` makes of `source`."""
    node = TransformNode(
        id=_mint_call_id(),
        session_id=session.id,
        inputs=(source.id,),
        output=output.id,
        name=name or output.name,
        submitted=now,
        pipeline=transform.text,
    )
    return Job(
        node,
        session,
        CallSpec(request=None, output=output.id, transform=transform, dedupe=False),
        None,
        inputs={source.id: source},
        foreign={},
        output=output,
        attended=False,
    )


def _check_placeholders(template: BodyTemplate) -> None:
    """Every placeholder is declared, and every declared one occurs."""
    if template.undeclared:
        names = ", ".join(f"'{name}'" for name in sorted(template.undeclared))
        raise InvalidRequestError(
            f"The prompt has placeholders that 'inputs' does not declare: {names}. "
            "Declare them, or write the prompt without double braces.",
            param="inputs",
            code="undeclared_placeholder",
        )
    if template.unused:
        names = ", ".join(f"'{name}'" for name in sorted(template.unused))
        raise InvalidRequestError(
            f"'inputs' declares what stands nowhere in the prompt: {names}.",
            param="inputs",
            code="unused_input",
        )
