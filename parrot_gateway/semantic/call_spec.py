"""What a call of a session is, before it runs: a plain value that anybody can make.

The ordinary API makes one from a request's headers and body, Parrot's own API from its template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parrot_scheduler.task import Objective

from parrot_gateway.generation.requests.call import CallRequest
from parrot_gateway.generation.requests.prepared import PreparedCall
from parrot_gateway.semantic.contexts import ContextName
from parrot_gateway.semantic.templates.body_template import Binding
from parrot_gateway.semantic.transforms.transform import Transform


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """One call, as it is submitted to `SemanticService.submit`."""

    #: With placeholders and references; its field `parrot` is left out. None: a transform.
    request: CallRequest | None
    #: The request, checked against the model of an own engine, where that was done.
    checked: PreparedCall[Any] | None = None
    #: What the placeholders stand for.
    inputs: Mapping[str, Binding] = field(default_factory=dict)
    #: Put values in as they are, also within strings of JSON documents in the prompt; and take
    #: `{{other}}`, which `inputs` does not declare, for text.
    verbatim: bool = False
    #: Id of the variable of the session that takes the text; None when nobody else reads it.
    output: str | None = None
    #: The named context that it goes on from.
    context: ContextName | None = None
    #: Applied to the text before it becomes the value.
    transform: Transform | None = None
    #: Cuts a text to so many tokens of the call's model, for transforms that want it.
    cut_tokens: Callable[[str, int], str] | None = None
    #: What it is for; None leaves that to deduction.
    objective: Objective | None = None
    #: Larger runs earlier.
    priority: int = 0
    #: A deferred call takes the value of an identical deterministic one of its session.
    dedupe: bool = True
    #: What pictures call it.
    name: str = ""
    #: The client's own ids of the call, and of the step of its program that it is part of.
    run: str | None = None
    parent: str | None = None
    #: Calls of the session with the same one matter only together.
    group: str | None = None
    #: The client's headers, names in lower case, for upstreams.
    headers: Sequence[tuple[bytes, bytes]] = ()

    @property
    def size_bytes(self) -> int:
        """What it takes to keep it until it runs."""
        headers = sum(len(name) + len(value) for name, value in self.headers)
        return headers + (0 if self.request is None else self.request.size)
