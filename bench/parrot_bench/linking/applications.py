"""Described applications as scripts for linking: instances share templates, not texts.

The answers of models and the passages of documents are drawn. The truth about edges follows from
the description: an output in the history is continued, one in the prompt is read.
"""

from __future__ import annotations

from collections.abc import Callable

from parrot_bench.applications import conversations
from parrot_bench.applications.coding import coding
from parrot_bench.applications.description import Application, Call, Output, Part, Passage
from parrot_bench.applications.summaries import chain, map_reduce, tree
from parrot_bench.linking.script import (
    PERSON_S,
    PROGRAM_S,
    TOOL_S,
    Chain,
    Message,
    Script,
    tool_call,
    tool_result,
)
from parrot_bench.linking.text import Text

CHARACTERS_PER_TOKEN = 4
_COPILOT = (
    "You are the copilot of a large office product. You answer in the tone of the house, short and "
    "polite, and you never give legal advice. " * 12
)


def _document(name: str, count: int, tokens: int = 500) -> list[Passage]:
    return [Passage(name, tokens, number) for number in range(count)]


def _question(name: str) -> Passage:
    return Passage(f"{name} asks", 20)


def _turns(text: Text, name: str) -> list[tuple[Passage, int]]:
    lengths = [text.draw.choice((5, 20, 75)) for _ in range(text.draw.randint(2, 8))]
    return [(Passage(f"{name} said {n}", tokens), 100) for n, tokens in enumerate(lengths)]


#: By name, an application whose size is drawn from a source of texts.
RECIPES: dict[str, Callable[[str, Text], Application]] = {
    "chain_summary": lambda name, text: chain(name, _document(name, 8), 100),
    "map_reduce": lambda name, text: map_reduce(
        name, _document(name, text.draw.randint(4, 12)), text.characters() // CHARACTERS_PER_TOKEN
    ),
    "tree_summary": lambda name, text: tree(name, _document(name, 9, 375), 125),
    "multi_agent": lambda name, text: coding(name, 4, 0.5, reviews=2),
    "tool_agent": lambda name, text: conversations.researcher(
        name,
        _question(name),
        [text.draw.choice((10, 100, 750)) for _ in range(text.draw.randint(2, 8))],
        60,
    ),
    "planned_agent": lambda name, text: conversations.planned(
        name, Passage(f"{name} asks", 20), 90
    ),
    "debate": lambda name, text: conversations.debate(name, Passage(f"{name} asks", 20), 100),
    "chat": lambda name, text: conversations.chat(name, _turns(text, name)),
    "copilot": lambda name, text: conversations.question(
        name, "copilot", (_COPILOT,), (Passage(f"{name} asks", 30),), 75, as_chat=True
    ),
}


def applications(instances: int, seed: int, only: str | None = None) -> list[Script]:
    """Make `instances` sessions, the recipes in turn."""
    names = list(RECIPES) if only is None else [only]
    scripts = []
    for number in range(instances):
        name = names[number % len(names)]
        script = Script(f"{name}-{number}")
        text = Text(f"{seed} {script.session}")
        write(RECIPES[name](script.session, text), script, text)
        scripts.append(script)
    return scripts


def write(application: Application, script: Script, text: Text) -> None:
    """Add the calls of an application to a script, with texts of their own."""
    _Writer(application, script, text).write()


class _Writer:
    """One application on its way into a script."""

    def __init__(self, application: Application, script: Script, text: Text) -> None:
        self._application, self._script, self._text = application, script, text
        self._passages: dict[Passage, str] = {}
        #: By call of the description: its answer, its id in the script, the chain that it ended.
        self._answers: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._chains: dict[str, Chain] = {}

    def write(self) -> None:
        for call in self._application.calls:
            if call.history or self._successors(call):
                self._turn(call)
            else:
                self._single(call)

    def _single(self, call: Call) -> None:
        answer = self._answers[call.name] = self._answer(call)
        self._ids[call.name] = self._script.ask(
            self._string(call.prompt),
            answer,
            reads=[self._ids[name] for name in call.reads],
            pause_s=TOOL_S if call.role == "answerer" else PROGRAM_S,
            role=call.role,
        )

    def _turn(self, call: Call) -> None:
        """Add a call of a conversation: it opens a chain, or goes on with that of another."""
        answer = self._answers[call.name] = self._answer(call)
        sources = [self._ids[part.call] for part in call.prompt if isinstance(part, Output)]
        content = self._string(call.prompt)
        before = _continued(call)
        if before is None:
            opening = [
                {"role": message.role, "content": self._string(message.content)}
                for message in call.history
            ]
            chain_ = Chain(self._script, list(opening))
        else:
            chain_ = self._chains[before]
        if call.last == "tool":
            chain_.hear(tool_result(_tool_id(chain_), content))
        else:
            chain_.hear({"role": "user", "content": content}, *sources)
        asks = any(other.last == "tool" for other in self._successors(call))
        pause_s = {"agent": TOOL_S, "chat": PERSON_S}.get(call.role, PROGRAM_S)
        said = self._tool_call(answer) if asks else answer
        self._ids[call.name] = chain_.call(said, pause_s=pause_s, role=call.role)
        self._chains[call.name] = chain_

    def _successors(self, call: Call) -> list[Call]:
        """The calls whose conversation goes on from this one."""
        return [other for other in self._application.calls if _continued(other) == call.name]

    def _tool_call(self, answer: str) -> Message:
        draw = self._text.draw
        arguments = f'{{"query": "{self._text.name()} {self._text.name()}", "limit": 5}}'
        said = answer if draw.random() < 0.4 else None
        return tool_call(self._text.identifier(), "search", arguments, said)

    def _answer(self, call: Call) -> str:
        text = self._text
        if call.copies:
            lines = self._answers[call.copies].split("\n")
            lines[text.draw.randrange(2, len(lines) - 1)] = f"    {text.name()} = {text.name()}()"
            return "\n".join(lines)
        if call.writes == "code":
            return f"```python\n{text.code(text.draw.randint(2, 5))}```"
        if call.writes == "title":
            return text.name()
        return text.answer(call.tokens * CHARACTERS_PER_TOKEN)

    def _string(self, parts: tuple[Part, ...]) -> str:
        return "".join(map(self._shown, parts))

    def _shown(self, part: Part) -> str:
        if isinstance(part, Output):
            return self._answers[part.call]
        if isinstance(part, str):
            return part
        if part not in self._passages:
            self._passages[part] = self._text.prose(part.tokens * CHARACTERS_PER_TOKEN)
        return self._passages[part]


def _continued(call: Call) -> str | None:
    """The call that the conversation of `call` goes on from."""
    said = (
        part.call
        for message in reversed(call.history)
        for part in message.content
        if message.role == "assistant" and isinstance(part, Output)
    )
    return next(said, None)


def _tool_id(chain_: Chain) -> str:
    """The id of the tool call that the last message of a chain makes."""
    calls: list[dict[str, str]] = chain_.messages[-1]["tool_calls"]
    return calls[0]["id"]
