"""A workload: applications as a live client runs them, their texts taken from the book."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal
from zlib import crc32

from parrot_bench.applications.description import (
    Application,
    Call,
    Message,
    Output,
    Part,
    Passage,
    Prompt,
)
from parrot_bench.apps import book

#: Ways to run an application. "one by one": a client sends the next call when it has the answer to
#: the last. "parallel": it sends each call as soon as it has what the call reads. "named session":
#: the same, each call with its application's session and its objective. "semantic variables": it
#: sends all calls at once, and the gateway passes the texts on.
Way = Literal["one by one", "parallel", "named session", "semantic variables"]
SEMANTIC: Way = "semantic variables"
NAMED: Way = "named session"

#: More than an application has calls: the same call of two applications differs in its seed.
SEEDS = 1000


@dataclass(frozen=True, slots=True)
class Workload:
    """Applications that run at the same time."""

    name: str
    jobs: tuple[Application, ...]
    #: Kinds of applications whose time is counted per token of the answer.
    per_token: Collection[str] = ()

    @property
    def calls(self) -> list[Call]:
        return [call for job in self.jobs for call in job.calls]

    @property
    def tokens(self) -> int:
        return sum(job.tokens for job in self.jobs)


@dataclass(frozen=True, slots=True)
class Size:
    #: Steps, chunks, files or chats.
    count: int
    #: Multiplies the paper's numbers of tokens (and seconds between arrivals).
    scale: float
    #: Of the model's tokenizer on the book, on average.
    characters_per_token: float = 3.6
    #: Of what is drawn: lengths, arrivals.
    seed: int = 0

    def tokens(self, paper: float) -> int:
        """The paper's number of tokens, scaled; 1 at least."""
        return max(1, round(paper * self.scale))

    def text(self, passage: Passage) -> str:
        """The text of a passage: where its document begins in the book follows from its name."""
        characters = max(20, round(passage.tokens * self.characters_per_token))
        start = crc32(passage.source.encode()) if passage.source else 0
        return book.passage(characters, start + passage.number * characters)


def live(
    applications: Iterable[Application], size: Size, salts: Callable[[Application], str]
) -> tuple[Application, ...]:
    """The applications with texts and a salt in each call, ready to be sent together.

    A salt stands behind the template's words; nothing behind it is found in a prefix cache. Calls
    of several applications get their application's name in front of their own, and seeds of their
    own.
    """
    found = tuple(applications)
    return tuple(
        _live(job, size, salts(job), number if len(found) > 1 else None)
        for number, job in enumerate(found)
    )


def _live(job: Application, size: Size, salt: str, number: int | None) -> Application:
    prefix = "" if number is None else job.name.replace("-", "_") + "_"

    def written(part: Part) -> Part:
        if isinstance(part, Passage):
            return size.text(part)
        return Output(prefix + part.call) if isinstance(part, Output) else part

    def place(parts: Prompt) -> Prompt:
        return (parts[0], f"{salt}\n", *parts[1:])

    def salted(call: Call) -> Call:
        for index, (role, parts) in enumerate(call.history):
            if role == "user":
                history = list(call.history)
                history[index] = Message(role, place(parts))
                return replace(call, history=tuple(history))
        return replace(call, prompt=place(call.prompt))

    calls = tuple(
        replace(
            salted(call).changed(written),
            name=prefix + call.name,
            seed=call.seed + SEEDS * (number or 0),
            pause_s=call.pause_s * size.scale,
        )
        for call in job.calls
    )
    return replace(job, calls=calls, finals=tuple(prefix + name for name in job.finals))
