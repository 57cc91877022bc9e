"""A request body as a template: JSON in, JSON out, with values inserted in its texts.

`PROMPT_LOCATIONS` lists the texts of each kind of request; model, tools, stop strings, images and
unknown fields are never searched. Only arrays and objects around a text with places are rewritten,
without optional blanks; every other value keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, KeysView, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import msgspec

from parrot_gateway.calls.requests.call import (
    CallRequest,
    in_thread_if_large,
    read_object,
    read_value,
)
from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.semantic.templates.reference import has_reference
from parrot_gateway.semantic.templates.text_template import (
    MAX_INSERTED_CHARACTERS,
    Binding,
    Filling,
    Names,
    TextTemplate,
)

#: Levels of arrays and objects followed when every string is examined.
MAX_DEPTH = 64
#: Largest body read in place: takes some milliseconds, or fifteen if it is mostly references.
INLINE_BYTES = 16 * 1024

_T = TypeVar("_T")
_Node: TypeAlias = "TextTemplate | dict[str, _Child] | list[_Child]"
_Child: TypeAlias = "msgspec.Raw | _Node"

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_STRING = msgspec.json.Decoder(str)


@dataclass(frozen=True, slots=True)
class PromptLocation:
    """Location of texts in a JSON value."""

    #: True: the string is a text that may contain references and placeholders.
    is_text: bool = False
    #: True: the string is itself a JSON document.
    is_json: bool = False
    #: Locations in an array's items.
    items: PromptLocation | None = None
    #: Locations in an object's fields.
    fields: Mapping[str, PromptLocation] = field(default_factory=dict)
    #: True: every string below, at any depth.
    is_anything: bool = False

    def item(self) -> PromptLocation | None:
        return self if self.is_anything else self.items

    def field_of(self, name: str) -> PromptLocation | None:
        return self if self.is_anything else self.fields.get(name)


_TEXT = PromptLocation(is_text=True)
_JSON_TEXT = PromptLocation(is_text=True, is_json=True)
_TEXTS = PromptLocation(is_text=True, items=_TEXT)
#: A string, or parts of which some are text.
_CONTENT = PromptLocation(
    is_text=True, items=PromptLocation(fields={"text": _TEXT, "refusal": _TEXT})
)
_TOOL_CALL = PromptLocation(
    fields={
        "function": PromptLocation(fields={"arguments": _JSON_TEXT}),
        "custom": PromptLocation(fields={"input": _TEXT}),
    }
)
_MESSAGE = PromptLocation(
    fields={
        "content": _CONTENT,
        "refusal": _TEXT,
        "reasoning": _TEXT,
        "reasoning_content": _TEXT,
        "tool_calls": PromptLocation(items=_TOOL_CALL),
        "function_call": PromptLocation(fields={"arguments": _JSON_TEXT}),
    }
)
#: An item of the Responses API: a message, a tool call, or a tool's output.
_ITEM = PromptLocation(
    is_text=True,
    fields={
        "content": _CONTENT,
        "arguments": _JSON_TEXT,
        "input": _TEXT,
        "output": _CONTENT,
        "summary": _CONTENT,
    },
)

ANYTHING = PromptLocation(is_text=True, is_anything=True)

PROMPT_LOCATIONS: Mapping[str, PromptLocation] = {
    "completions": PromptLocation(fields={"prompt": _TEXTS, "suffix": _TEXT}),
    "chat": PromptLocation(
        fields={
            "messages": PromptLocation(items=_MESSAGE),
            "prediction": PromptLocation(fields={"content": _CONTENT}),
        }
    ),
    "responses": PromptLocation(
        fields={"instructions": _TEXT, "input": PromptLocation(is_text=True, items=_ITEM)}
    ),
    "embeddings": PromptLocation(fields={"input": _TEXTS}),
}


class BodyTemplate:
    """One request body with places for values. Made with `of`, `of_call` or `everywhere`."""

    __slots__ = ("_body", "_root", "_texts", "undeclared", "unused", "variables")

    def __init__(
        self, body: bytes, root: _Child | None, texts: list[TextTemplate], names: Names
    ) -> None:
        self._body = body
        #: None if the body stays unchanged.
        self._root = root
        self._texts = texts
        #: Ids of the variables that it needs, in order of first use.
        self.variables: KeysView[str] = dict.fromkeys(
            chain.from_iterable(text.variables for text in texts)
        ).keys()
        #: `{{name}}` that `inputs` does not declare; empty if `inputs` is empty.
        self.undeclared = frozenset(names.undeclared)
        #: Names in `inputs` that do not occur.
        self.unused: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        body: bytes,
        kind: str,
        inputs: Mapping[str, Binding] | None = None,
        *,
        fields: dict[str, msgspec.Raw] | None = None,
        without: Collection[str] = (),
        verbatim: bool = False,
    ) -> BodyTemplate:
        """Read the body of a request.

        Args:
            kind: a key of `PROMPT_LOCATIONS`; any other has no texts.
            inputs: the declared placeholders.
            fields: the body's fields, if already read.
            without: fields of the body to leave out.
            verbatim: values are inserted without escapes, even in strings of a JSON document:
                text generated right after such a place continues the value itself.

        Raises:
            InvalidRequestError: the body is not a JSON object, or not valid UTF-8.
        """
        if fields is None:
            body, fields = read_object(body)
        inputs = inputs or {}
        compiler = _Compiler(inputs, verbatim=verbatim)
        root = compiler.compile_fields(fields, PROMPT_LOCATIONS.get(kind, PromptLocation()))
        if not fields.keys().isdisjoint(without):
            kept: dict[str, _Child] = {**fields, **(root or {})}
            root = {name: child for name, child in kept.items() if name not in without}
        template = cls(body, root, compiler.texts, compiler.names)
        template.unused = frozenset(inputs.keys() - compiler.names.used)
        return template

    @classmethod
    def of_call(
        cls,
        request: CallRequest,
        inputs: Mapping[str, Binding] | None = None,
        *,
        verbatim: bool = False,
    ) -> BodyTemplate:
        """Read a call without its field `parrot`; the other arguments are those of `of`."""
        # NOTE: the fields come first, because reading them repairs the body.
        fields, without = request.fields, ("parrot",)
        return cls.of(
            request.body, request.kind, inputs, fields=fields, without=without, verbatim=verbatim
        )

    @classmethod
    def everywhere(cls, body: bytes) -> BodyTemplate:
        """Read any JSON value; all its strings are texts, except field names.

        Raises:
            InvalidRequestError: it is not JSON or not valid UTF-8, or a reference is nested in more
                than `MAX_DEPTH` arrays and objects.
        """
        body, raw = read_value(body)
        compiler = _Compiler({})
        return cls(body, compiler.compile(raw, ANYTHING), compiler.texts, compiler.names)

    @property
    def is_constant(self) -> bool:
        return not self._texts

    @property
    def is_unchanged(self) -> bool:
        return self._root is None

    def bind(self, typed: _T, values: Mapping[str, str]) -> _T:
        """Return a copy of `typed`, the decoded body, with values as in `render`."""
        if not self._texts:
            return typed
        bound: _T = _bind(self._root, typed, Filling(values, self.variables))
        return bound

    def render(
        self, values: Mapping[str, str], *, max_characters: int = MAX_INSERTED_CHARACTERS
    ) -> bytes:
        """Return the body with the values of all `variables` in place.

        Raises:
            KeyError: one of them is missing.
            RequestTooLargeError: the values exceed `max_characters`.
        """
        if self._root is None:
            return self._body
        filling = Filling(values, self.variables, max_characters)
        return msgspec.json.encode(_fill(self._root, filling))


async def read_template(read: Callable[[], _T], num_bytes: int) -> _T:
    """Run `in_thread_if_large` for reading templates, which takes longer than decoding."""
    return await in_thread_if_large(read, num_bytes, INLINE_BYTES)


def _fill(child: _Child, filling: Filling) -> Any:
    if isinstance(child, TextTemplate):
        return child.fill(filling)
    if isinstance(child, dict):
        return {name: _fill(value, filling) for name, value in child.items()}
    if isinstance(child, list):
        return [_fill(value, filling) for value in child]
    return child


def _bind(child: _Child | None, value: Any, filling: Filling) -> Any:
    """Return `value`, the decoded form of `child`, with its texts filled."""
    if isinstance(child, TextTemplate):
        return child.fill(filling)
    if isinstance(child, dict):
        if isinstance(value, msgspec.Struct):
            changed = {
                name: _bind(below, getattr(value, name), filling)
                for name, below in child.items()
                if not isinstance(below, msgspec.Raw) and hasattr(value, name)
            }
            return msgspec.structs.replace(value, **changed)
        return {name: _bind(below, value[name], filling) for name, below in child.items()}
    if isinstance(child, list):
        return [_bind(below, item, filling) for below, item in zip(child, value, strict=True)]
    return value


class _Compiler:
    """Finds the texts of one body."""

    def __init__(self, inputs: Mapping[str, Binding], *, verbatim: bool = False) -> None:
        self._inputs = inputs
        self._verbatim = verbatim
        self.names = Names()
        #: Texts with a place for a value.
        self.texts: list[TextTemplate] = []

    def _may_hold(self, data: bytes) -> bool:
        if self._inputs and (b"{{" in data or b"u007" in data):
            return True
        return has_reference(data)

    def compile(self, raw: msgspec.Raw, location: PromptLocation, depth: int = 0) -> _Node | None:
        """Return the value as a template; None if it has no places."""
        data = bytes(raw)
        if not self._may_hold(data):
            return None
        if depth > MAX_DEPTH:
            raise InvalidRequestError("The JSON of your request is nested too deeply.")
        if data[0] == ord('"') and location.is_text:
            return self._compile_text(data, is_json=location.is_json)
        if data[0] == ord("{"):
            return self.compile_fields(_OBJECT.decode(data), location, depth)
        item = location.item()
        if data[0] == ord("[") and item is not None:
            return self._compile_items(_ARRAY.decode(data), item, depth)
        return None

    def _compile_text(self, data: bytes, *, is_json: bool) -> TextTemplate | None:
        text = _STRING.decode(data)
        template = TextTemplate.of(
            text, self._inputs, is_json=is_json, verbatim=self._verbatim, names=self.names
        )
        if template.is_constant:
            return None
        self.texts.append(template)
        return template

    def compile_fields(
        self, fields: dict[str, msgspec.Raw], location: PromptLocation, depth: int = 0
    ) -> dict[str, _Child] | None:
        """Return an object's fields if at least one is a template."""
        children: dict[str, _Child] = {}
        for name, raw in fields.items():
            below = location.field_of(name)
            node = None if below is None else self.compile(raw, below, depth + 1)
            if node is not None:
                children[name] = node
        return {**fields, **children} if children else None

    def _compile_items(
        self, items: list[msgspec.Raw], location: PromptLocation, depth: int
    ) -> list[_Child] | None:
        children = [self.compile(raw, location, depth + 1) for raw in items]
        if all(node is None for node in children):
            return None
        return [raw if node is None else node for raw, node in zip(items, children, strict=True)]
