"""Parrot's extras: what a call may say besides what OpenAI's do.

The same names as constructor arguments of a model and as arguments of a call; the call's win. They
travel as the field `parrot` of the body, whose meaning is in docs/semantic-variables.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

#: Arguments of a call that are fields of the body's `parrot`.
FIELDS = (
    "session",
    "output",
    "inputs",
    "objective",
    "transform",
    "context",
    "priority",
    "dedupe",
    "name",
    "group",
    "defer",
)

#: Where a field of that name is kept.
_ATTRIBUTES = {"transform": "variable_transform"}

#: Fields that a server cannot ignore without giving a wrong answer.
ESSENTIAL = ("output", "inputs", "transform", "context", "defer")


class ParrotFields(BaseModel):
    """Mixin: Parrot's extras as constructor arguments.

    Attributes:
        session: the session of the calls, by id or by any name; a LangGraph thread or the root run
            where none is given.
        output: name of the variable that the text of the call fills.
        inputs: what `{{name}}` in a prompt stands for: a variable (name, id or reference),
            `{"variable": …}` or `{"value": "text"}`.
        objective: `latency`, `throughput`, `ttft=200ms`, `tpot=50ms` or `deadline=2s`.
        variable_transform: argument `transform`: what is done to the text before it fills its
            variable, such as `json(/summary)`.
        context: goes on from a named context of the session.
        priority: an integer; larger runs earlier.
        dedupe: False runs a deferred call even if an identical one was run.
        name: what pictures of the graph, and LangChain's traces, call it.
        group: calls of a session with the same group are one task group.
        defer: answer at once, with a text whose value comes when it is looked at.
        linking: tell the gateway session, call, parent, node name and group from LangChain's run
            tree. What is given here or with a call wins.
    """

    model_config = ConfigDict(populate_by_name=True)

    session: str | None = None
    output: str | None = None
    inputs: Mapping[str, Any] | None = None
    objective: str | None = None
    # NOTE: LangChain's runnables have a method `transform`.
    variable_transform: str | None = Field(default=None, alias="transform")
    context: str | None = None
    priority: int | None = None
    dedupe: bool | None = None
    name: str | None = None
    group: str | None = None
    defer: bool = False
    linking: bool = True

    def parrot_fields(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """What constructor and call say.

        Args:
            arguments: of the call; Parrot's are taken out of it.

        Returns:
            The fields with a value, the call's before the constructor's.
        """
        fields = {name: getattr(self, _ATTRIBUTES.get(name, name)) for name in FIELDS}
        for name in FIELDS:
            given = arguments.pop(name, None)
            if given is not None:
                fields[name] = given
        if not fields["defer"]:
            del fields["defer"]
        return {name: value for name, value in fields.items() if value is not None}
