"""A session's call before it runs, as a plain value.

The ordinary API builds one from a request's headers and body, Parrot's own API from its template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parrot_scheduler.task import Objective

from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.calls.requests.prepared import PreparedCall
from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.semantic.contexts import ContextName
from parrot_gateway.semantic.templates.text_template import Binding
from parrot_gateway.semantic.transforms.transform import Transform


def parse_objective(text: str, param: str = "objective") -> Objective:
    """Read `latency`, `throughput`, `ttft=200ms`, `tpot=50ms` or `deadline=2s`.

    Raises:
        InvalidRequestError: anything else: see `Objective.parse`.
    """
    try:
        return Objective.parse(text)
    except ValueError as error:
        raise InvalidRequestError(str(error), param=param, code="invalid_value") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options of a call besides its variables and context."""

    #: Applied to the text before it becomes the value.
    transform: Transform | None = None
    #: None: deduced from the graph.
    objective: Objective | None = None
    #: Larger runs earlier.
    priority: int = 0
    #: True: a deferred call takes the value of an identical deterministic call of its session.
    dedupe: bool = True
    #: Label in pictures of the graph.
    name: str = ""
    #: The client's own ids of the call, and of its program's step.
    run: str | None = None
    parent: str | None = None
    #: Name of the task group that the client declares.
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec(CallOptions):
    """One call, as it is submitted to `SemanticService.submit`."""

    #: The request with placeholders and references, without its field `parrot`. None for a
    #: transform.
    request: CallRequest | None
    #: The request checked against the model of an own engine, if that was done.
    checked: PreparedCall[Any] | None = None
    #: Values of the placeholders.
    inputs: Mapping[str, Binding] = field(default_factory=dict)
    #: True: values are inserted without escapes, even in strings of JSON documents, and an
    #: undeclared `{{name}}` is text.
    verbatim: bool = False
    #: Id of the session variable that the text fills; None if there is none.
    output: str | None = None
    #: The named context that the call continues.
    context: ContextName | None = None
    #: Cuts a text to a number of the model's tokens, for transforms that need it.
    cut_tokens: Callable[[str, int], str] | None = None
    #: The client's headers with lower-case names, for upstreams.
    headers: Sequence[tuple[bytes, bytes]] = ()

    @property
    def size_bytes(self) -> int:
        """Return the bytes of its body and headers."""
        headers = sum(len(name) + len(value) for name, value in self.headers)
        return headers + (0 if self.request is None else self.request.size)
