"""A call of Parrot's own API as the ordinary calls that it stands for.

One template may have several outputs, each generated from everything before it. It becomes a chain
of calls, one an output, whose prompt is the template up to it: earlier outputs are inputs of later
calls. Every prompt is tokenized whole, and what two prompts share is found in the prefix cache.

Plain values in, plain values out: no HTTP, no session, no model is asked. Names here are those of
parameters; which variables they stand for is decided by whoever submits the calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from parrot_scheduler.task import LATENCY, THROUGHPUT, Objective

from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.generation.requests.call import CallRequest
from parrot_gateway.semantic.graph.objective import parse_objective
from parrot_gateway.semantic.templates.body_template import (
    Placeholder,
    is_placeholder_name,
    parse_placeholders,
)
from parrot_gateway.semantic.templates.text_template import undeclared_placeholders

#: How a model is spoken to: as one text, or as messages of a user and an assistant.
Form: TypeAlias = Literal["text", "messages"]

#: Generations of one call: each is a call of its own on an engine.
MAX_OUTPUTS = 64

#: The criteria of the original that name a kind of time, but no time.
TTFT = Objective("ttft", 0.5)
TPOT = Objective("tpot", 0.05)
_CRITERIA = {"latency": LATENCY, "throughput": THROUGHPUT, "ttft": TTFT, "tpot": TPOT}


class OutputStep(NamedTuple):
    """One generation of a call.

    `before` is the template up to it, cut into the texts that were filled and the outputs that
    were generated, in turn; a text may hold placeholders of inputs and of earlier outputs.
    """

    output: str
    before: tuple[str | Placeholder, ...]
    #: Parameters that `before` reads, in the order of their first place.
    reads: tuple[str, ...]

    @property
    def size(self) -> int:
        """Characters of the template up to here."""
        return sum(
            len(part) if isinstance(part, str) else len(part.name) + 4 for part in self.before
        )


def objective_of(criteria: str | None, param: str) -> Objective | None:
    """A performance criterion: "latency", "throughput", "TTFT", "TPOT", in any case; or an
    objective of the ordinary API, such as `ttft=200ms`.

    Raises:
        InvalidRequestError: it is neither; names `param`.
    """
    if criteria is None:
        return None
    known = _CRITERIA.get(criteria.strip().lower())
    return known if known is not None else parse_objective(criteria, param)


def steps_of(template: str, inputs: Collection[str], outputs: Collection[str]) -> list[OutputStep]:
    """The generations that a template asks for, in its order.

    The first place of an output is where it is generated; at further places it is read. Text
    behind the last output is read by nobody and left out. `{{other}}` is ordinary text, unless an
    input has no place, which looks like one that is misspelt.

    Args:
        inputs, outputs: the declared parameters.

    Raises:
        InvalidRequestError: a name cannot stand in a template, there is no output or one of them
            has no place, there are too many, or one has nothing at all before it.
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
    #: Parts of the text since the last output; joined once, so that the work is linear.
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
    """The ordinary call, with placeholders `{{name}}` for all that `step` reads.

    Args:
        form: of the prompt; in messages, what was filled is the user's and what was generated
            the assistant's.
        fields: all others: model and sampling.
    """
    if form == "text":
        prompt = "".join(_written(part) for part in step.before)
        return CallRequest("completions", msgspec.json.encode({**fields, "prompt": prompt}))
    messages = list(_messages(step.before))
    return CallRequest("chat", msgspec.json.encode({**fields, "messages": messages}))


def _messages(parts: Sequence[str | Placeholder]) -> Iterator[dict[str, str]]:
    role, content = "", ""
    for part in parts:
        speaker = "user" if isinstance(part, str) else "assistant"
        if role and speaker != role:
            yield {"role": role, "content": content}
            content = ""
        role, content = speaker, content + _written(part)
    yield {"role": role, "content": content}


def _written(part: str | Placeholder) -> str:
    return part if isinstance(part, str) else f"{{{{{part.name}}}}}"


def _invalid(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="invalid_value")
