"""What stands in the signature of a semantic function: `Input` and `Output`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from parrot_functions._text import Call, Text


class InputMark:
    """Tells a parameter that is an input from one that is a plain Python value."""


#: A parameter whose text the server puts in: a string, or a text that may not be written yet.
#: Parameters with any other annotation are rendered with `str` before anything is sent.
Input: TypeAlias = Annotated[str | Text | Call, InputMark()]


@dataclass(frozen=True, slots=True)
class Output:
    """A parameter that the model writes, and how. Callers never pass it.

    Fields left at None are not sent: the server decides, as it does for `/v1/completions`, where
    `max_tokens` is 16.

    Attributes:
        transform: a pipeline of the server's transforms; later parts of the template, other
            functions and readers see what it makes of the model's text.
        extra: further fields of the request's body, such as `{"top_k": 20}`.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    transform: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def sampling(self) -> dict[str, Any]:
        """The fields for the body of a completion request."""
        named = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop
            if self.stop is None or isinstance(self.stop, str)
            else list(self.stop),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        return {
            **{name: value for name, value in named.items() if value is not None},
            **self.extra,
        }
