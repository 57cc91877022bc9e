"""What a workload is: jobs of calls whose prompts hold text and the outputs of other calls.

Pure description. How many round trips a way of running it needs follows from the description.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

#: Ways to run a job. "one by one": a client sends the next call when it has the answer to the
#: last. "parallel": it sends each call as soon as it has what the call reads. "named session": the
#: same, each call with its job's session and its objective. "semantic variables": it sends all
#: calls at once, and the gateway passes the texts on.
Way = Literal["one by one", "parallel", "named session", "semantic variables"]
SEMANTIC: Way = "semantic variables"
NAMED: Way = "named session"


class Output(NamedTuple):
    """In a prompt: what another call of the job has answered."""

    call: str


Prompt: TypeAlias = tuple[str | Output, ...]


class Message(NamedTuple):
    """A message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: Prompt


@dataclass(frozen=True, slots=True)
class Call:
    """One chat completion whose answer has exactly `tokens` tokens."""

    #: Unique in its workload; a letter, then letters, digits and `_`.
    name: str
    prompt: Prompt
    tokens: int
    seed: int
    #: As in `X-Parrot-Objective`; empty leaves it to the gateway.
    objective: str = ""
    #: Messages before the prompt, which is the last one and the user's.
    history: tuple[Message, ...] = ()
    #: What the client does (runs a tool) once it has what the call reads, in seconds.
    pause_s: float = 0.0

    @property
    def reads(self) -> tuple[str, ...]:
        """Calls whose outputs the messages hold, each once, in order."""
        prompts = (*(message.content for message in self.history), self.prompt)
        outputs = (part for prompt in prompts for part in prompt if isinstance(part, Output))
        return tuple(dict.fromkeys(part.call for part in outputs))

    def text(self, show: Callable[[str], str]) -> str:
        """The prompt, with `show(call)` in place of each output."""
        return _text(self.prompt, show)

    def messages(self, show: Callable[[str], str]) -> list[dict[str, str]]:
        """The chat as it is sent, with `show(call)` in place of each output."""
        return [
            {"role": role, "content": _text(content, show)}
            for role, content in (*self.history, Message("user", self.prompt))
        ]


def _text(prompt: Prompt, show: Callable[[str], str]) -> str:
    return "".join(show(part.call) if isinstance(part, Output) else part for part in prompt)


@dataclass(frozen=True, slots=True)
class Job:
    """Calls that someone starts together, producers first, to read some of the outputs."""

    name: str
    #: Jobs of one kind are compared with each other.
    kind: str
    calls: tuple[Call, ...]
    #: Calls whose texts are read.
    finals: tuple[str, ...]
    #: When it starts, in seconds after the workload does.
    arrives_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(call.tokens for call in self.calls)

    @property
    def pauses_s(self) -> float:
        """Of all its calls."""
        return sum(call.pause_s for call in self.calls)

    def depths(self) -> Mapping[str, int]:
        """For each call the number of calls on the longest path to and with it."""
        found: dict[str, int] = {}
        for call in self.calls:
            found[call.name] = 1 + max((found[name] for name in call.reads), default=0)
        return found

    def round_trips(self, way: Way) -> int:
        """Round trips that its client makes one after another."""
        if way == "one by one":
            return len(self.calls)
        return 1 if way == SEMANTIC else max(self.depths().values())


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs, and the ways in which ordinary clients would run them."""

    name: str
    jobs: tuple[Job, ...]
    clients: tuple[Way, ...]
    #: Kinds of jobs whose time is counted per token of the answer.
    per_token: Collection[str] = ()

    @property
    def calls(self) -> list[Call]:
        return [call for job in self.jobs for call in job.calls]

    @property
    def tokens(self) -> int:
        return sum(job.tokens for job in self.jobs)


@dataclass(frozen=True, slots=True)
class Size:
    #: Steps, chunks, branches or chats.
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

    def characters(self, paper: float) -> int:
        """Characters that make about that many of the paper's tokens."""
        return max(20, round(paper * self.scale * self.characters_per_token))
