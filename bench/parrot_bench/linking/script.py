"""Calls of an application with the truth about them: what each reads, and in which session it is.

**Edges that are asked for.** An edge from call a to call b is true where a client has put a's
answer into b's prompt, or where b goes on from a. Its kinds:

- `continues`: b's client sent a before, and b's prompt is a's with more: the same chain. Elided,
  edited or cut histories change nothing: the previous call of the chain stays the source.
- `output`: text of a's answer stands in b's prompt, in whatever format.
- `tool`: b's prompt echoes the id of a tool call that a's answer made.
- `spawned`: b's first user message is an argument of a tool call that a's answer made.

**Neutral edges.** What b's chain had already read before is in b's history again. So the sources of
the call that b continues, and those neutral to it, are neither asked for nor wrong. Nothing else is
neutral by itself: where a reviser copies most of a file, a reader of the revised file reads the
reviser alone; the file's first author is an ancestor.

**Short answers.** "Yes" stands in many prompts. An edge whose only kind is `output` is neutral
where the answer has fewer than 20 characters; how many of them are found is counted apart.

**Sessions.** One run of one application. Calls that only a later call joins (the maps of a map and
reduce) are one session from the start; a linker is asked at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["continues", "output", "tool", "spawned"]
Message: TypeAlias = dict[str, Any]
Kinds: TypeAlias = tuple[Kind, ...]

KINDS: Kinds = ("continues", "output", "tool", "spawned")
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

#: Answers with fewer characters are short.
SHORT = 20
#: Seconds between the answer that a call waits for and the call: a program, a tool, a person.
PROGRAM_S, TOOL_S, PERSON_S = (0.002, 0.05), (0.05, 5.0), (2.0, 60.0)


@dataclass(frozen=True, slots=True)
class Call:
    """One call, what it is answered, and the truth about it."""

    id: str
    tenant: str
    session: str
    path: str
    request: Mapping[str, Any]
    #: None if it never gets one: its client has given up.
    answer: Mapping[str, Any] | None
    #: Calls whose answers its client waits for.
    after: tuple[str, ...]
    #: Edges asked for: kinds by source.
    edges: Mapping[str, Kinds]
    #: Sources of edges that are neither asked for nor wrong.
    neutral: frozenset[str]
    #: Those of them whose answers it reads, but they are short.
    short: frozenset[str]
    #: Its client sends it so long after the last of `after`: least and most seconds.
    pause_s: tuple[float, float]
    #: What it does in its application; calls of one role have the same constant beginning. Empty
    #: where that is not known.
    role: str = ""


@dataclass(slots=True)
class Script:
    """The calls of one session, in an order in which a client could send them.

    Args:
        session: unique in its workload; ids of calls begin with it.
        task: sessions of one task may be started together.
    """

    session: str
    tenant: str = "tenant"
    task: str = ""
    calls: dict[str, Call] = field(default_factory=dict)

    def add(
        self,
        request: Mapping[str, Any],
        answer: Mapping[str, Any] | None,
        *,
        path: str = CHAT,
        edges: Mapping[str, Kinds] | None = None,
        neutral: Iterable[str] = (),
        after: Iterable[str] | None = None,
        pause_s: tuple[float, float] = PROGRAM_S,
        role: str = "",
    ) -> str:
        """Add a call, and return its id. It waits for the sources of its edges, unless `after`."""
        edges = dict(edges or {})
        after = tuple(edges if after is None else after)
        short = {
            source
            for source, kinds in edges.items()
            if kinds == ("output",) and len(_said(self.calls[source].answer)) < SHORT
        }
        carried = {*neutral, *short}
        for source, kinds in edges.items():
            if "continues" in kinds:
                carried |= {*self.calls[source].edges, *self.calls[source].neutral}
        edges = {source: kinds for source, kinds in edges.items() if source not in short}
        call = Call(
            id=f"{self.session}.{len(self.calls)}",
            tenant=self.tenant,
            session=self.session,
            path=path,
            request=request,
            answer=answer,
            after=after,
            edges=edges,
            neutral=frozenset(carried - set(edges)),
            short=frozenset(short),
            pause_s=pause_s,
            role=role,
        )
        self.calls[call.id] = call
        return call.id

    def chat(self, messages: Iterable[Message], answer: str | Message | None, **how: Any) -> str:
        """Add a chat completion; `how` as in `add`."""
        request = {"model": "model", "messages": list(messages)}
        return self.add(request, None if answer is None else chat_answer(answer), **how)

    def ask(self, prompt: str, answer: str, **how: Any) -> str:
        """Add a chat completion of one user message that reads, as an `output`, calls `reads`."""
        reads = how.pop("reads", ())
        how.setdefault("edges", dict.fromkeys(reads, ("output",)))
        return self.chat([user(prompt)], answer, **how)


@dataclass(slots=True)
class Chain:
    """A conversation or agent loop: each call sends all messages so far.

    `messages` may be edited between calls; what the chain knows to be true stays so.
    """

    script: Script
    messages: list[Message]
    last: str | None = None
    #: Kinds of the next call's edge from `last`.
    kinds: Kinds = ("continues",)
    #: Calls whose answers have come into the history since the last call, and in which message.
    heard: list[tuple[str, Message]] = field(default_factory=list)

    def call(
        self,
        answer: str | Message,
        *,
        messages: list[Message] | None = None,
        edges: Mapping[str, Kinds] | None = None,
        **how: Any,
    ) -> str:
        """Send `messages` (default: all so far), and take the answer into the history.

        Args:
            edges: true besides those from the last call and from what was heard.
        """
        found: dict[str, Kinds] = {} if self.last is None else {self.last: self.kinds}
        sent = self.messages if messages is None else messages
        texts = "\n".join(str(message.get("content")) for message in sent)
        # What a window has dropped is not read; of equal messages the newest is.
        newest = {str(heard.get("content")): heard for _, heard in self.heard}
        for source, heard in self.heard:
            text = str(heard.get("content"))
            if newest[text] is heard and text in texts:
                found[source] = ("output",)
        found |= edges or {}
        if how.get("after") is None:
            how["after"] = dict.fromkeys([*found, *(source for source, _ in self.heard)])
        how["neutral"] = [*how.get("neutral", ()), *(source for source, _ in self.heard)]
        self.last = self.script.chat(sent, answer, edges=found, **how)
        message = assistant(answer) if isinstance(answer, str) else answer
        self.kinds = ("continues", "tool") if _has_ids(message) else ("continues",)
        self.messages, self.heard = [*self.messages, message], []
        return self.last

    def hear(self, message: Message, *sources: str) -> None:
        """Take a message into the history; the answers of `sources` stand in it."""
        self.messages = [*self.messages, message]
        self.heard += [(source, message) for source in sources]


def answer_id(call: str) -> str:
    """The id that the server gives the answer of a call."""
    return f"answer-{call}"


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def tool_call(id_: str, name: str, arguments: str, text: str | None = None) -> Message:
    """An assistant's message that calls one tool."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": id_, "type": "function", "function": function}]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def tool_result(id_: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def chat_answer(answer: str | Message) -> Message:
    """The JSON answer of a chat completion, without its id."""
    message = assistant(answer) if isinstance(answer, str) else answer
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return {"object": "chat.completion", "model": "model", "choices": [choice]}


def text_answer(text: str) -> Message:
    """The JSON answer of a completion, without its id."""
    choice = {"index": 0, "text": text, "finish_reason": "stop"}
    return {"object": "text_completion", "model": "model", "choices": [choice]}


def _has_ids(message: Message) -> bool:
    return any(call.get("id") for call in message.get("tool_calls") or ())


def _said(answer: Mapping[str, Any] | None) -> str:
    """The text of an answer, of whatever API."""
    parts = (answer or {}).get("choices", (answer or {}).get("output", ()))
    return "".join(str(_content(part.get("message", part)) or "") for part in parts)


def _content(part: Mapping[str, Any]) -> Any:
    return part.get("content", part.get("text"))
