"""The description of an application: calls whose prompts hold text and the outputs of other calls.

A description is pure data. Lengths are tokens; what a text says is for the renderer to choose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

#: `tool` is the result of a tool that the call before it asked for.
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


class Passage(NamedTuple):
    """A stretch of a document, which no call wrote. Equal passages have equal texts."""

    #: The name of the document.
    source: str
    tokens: int
    #: The number of the passage; passages of one length follow each other in the document.
    number: int = 0


class Output(NamedTuple):
    """The text that another call of the application answered."""

    call: str


#: Words of the application itself stand as they are.
Part: TypeAlias = str | Passage | Output
Prompt: TypeAlias = tuple[Part, ...]


class Message(NamedTuple):
    """A message of a chat."""

    role: Role
    content: Prompt


@dataclass(frozen=True, slots=True)
class Call:
    """One chat completion whose answer has exactly `tokens` tokens."""

    #: Unique in its application; a letter, then letters, digits and `_`.
    name: str
    prompt: Prompt
    tokens: int
    seed: int = 0
    #: As in `X-Parrot-Objective`; empty leaves it to the gateway.
    objective: str = ""
    #: Messages before the prompt, which is the last one and the user's.
    history: tuple[Message, ...] = ()
    #: Seconds between the arrival of what the call reads and the call: a tool, a person.
    pause_s: float = 0.0
    #: The template of the prompt: calls of one role begin alike.
    role: str = ""
    #: The role of the last message.
    last: Role = "user"
    #: The kind of text that it answers.
    writes: Literal["prose", "code", "title"] = "prose"
    #: The call whose answer it repeats with a small change, if any.
    copies: str = ""

    @property
    def chat(self) -> tuple[Message, ...]:
        """All messages, the prompt last."""
        return (*self.history, Message(self.last, self.prompt))

    @property
    def reads(self) -> tuple[str, ...]:
        """Calls whose outputs the messages hold, each once, in order."""
        parts = (part for message in self.chat for part in message.content)
        return tuple(dict.fromkeys(part.call for part in parts if isinstance(part, Output)))

    def changed(self, change: Callable[[Part], Part]) -> Call:
        """The call with `change` applied to each part of its messages."""
        history = tuple(Message(role, tuple(map(change, parts))) for role, parts in self.history)
        return replace(self, prompt=tuple(map(change, self.prompt)), history=history)

    def text(self, show: Callable[[str], str]) -> str:
        """The prompt, with `show(call)` in place of each output.

        Raises:
            TypeError: a passage has not been replaced by its text.
        """
        return _text(self.prompt, show)

    def messages(self, show: Callable[[str], str]) -> list[dict[str, str]]:
        """The chat as it is sent, with `show(call)` in place of each output.

        A tool's result is sent as the user's message.
        """
        return [
            {"role": "user" if role == "tool" else role, "content": _text(content, show)}
            for role, content in self.chat
        ]


def _text(prompt: Prompt, show: Callable[[str], str]) -> str:
    parts = []
    for part in prompt:
        if isinstance(part, Passage):
            raise TypeError(f"{part} has no text yet")
        parts.append(show(part.call) if isinstance(part, Output) else part)
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Application:
    """Calls that one client starts together, producers first, to read some of the outputs."""

    name: str
    #: Applications of one kind are compared with each other.
    kind: str
    calls: tuple[Call, ...]
    #: Calls whose texts are read.
    finals: tuple[str, ...]
    #: When it starts, in seconds after its workload does.
    arrives_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(call.tokens for call in self.calls)

    @property
    def pauses_s(self) -> float:
        """Seconds of pauses of all calls."""
        return sum(call.pause_s for call in self.calls)
