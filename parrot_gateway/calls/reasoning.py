"""Reasoning in the text of a model: between `<think>` and `</think>`, before its answer.

A model reasons if its chat template knows the markers. The template may open the reasoning itself,
at the end of the prompt, or close it there at once; else the answer may begin with it.
"""

from __future__ import annotations

import json
import re
from typing import Literal, NamedTuple, TypeAlias

from parrot_engine.protocol import Grammar
from parrot_engine.text import Tokenizer

from parrot_gateway.calls.tools.definitions import template_source

OPENING, CLOSING = "<think>", "</think>"

#: Where a text begins: within its reasoning, or where that may be opened.
ReasoningStart: TypeAlias = Literal["opened", "may_open"]

_START_RULE = re.compile(r"^start\s*:", re.MULTILINE)
_GAP = "\n\r\t "


def writes_reasoning(template: str) -> bool:
    """Return whether answers may hold reasoning, by the source of the model's chat template."""
    return CLOSING in template


def reasoning_start(template: str, prompt: str | None) -> ReasoningStart | None:
    """How an answer begins; None where it holds no reasoning.

    Args:
        template: the source of the model's chat template.
        prompt: as rendered.
    """
    if not writes_reasoning(template) or prompt is None:
        return None
    end = prompt.rstrip()
    if end.endswith(CLOSING):
        return None
    return "opened" if end.endswith(OPENING) else "may_open"


def without_reasoning(template: str, prompt: str) -> str:
    """A prompt whose answer holds no reasoning: what is or may be opened is closed at once.

    Args:
        template: the source of the model's chat template.
        prompt: as rendered, up to where the answer begins.
    """
    start = reasoning_start(template, prompt)
    if start is None:
        return prompt
    opened = prompt.rstrip() if start == "opened" else prompt + OPENING
    return f"{opened}\n\n{CLOSING}\n\n"


def uses_special_tokens(tokenizer: Tokenizer) -> bool:
    """Return whether a marker is a token that texts are usually shown without."""
    ids = [tokenizer.token_id(marker) for marker in (OPENING, CLOSING)]
    return any(token_id is not None and tokenizer.is_special(token_id) for token_id in ids)


def reasoning_and_grammar(
    prompt: str | None, grammar: Grammar | None, tokenizer: Tokenizer
) -> tuple[ReasoningStart | None, Grammar | None]:
    """How an answer begins, and the grammar for all of it.

    Args:
        prompt: as rendered.
        grammar: of what follows the reasoning.
        tokenizer: the model's.
    """
    start = reasoning_start(template_source(tokenizer.assets), prompt)
    if start is None or grammar is None:
        return start, grammar
    whole = behind_reasoning(grammar, start, tokenizer)
    # What cannot begin behind anything has no reasoning.
    return (None, grammar) if whole is None else (start, whole)


def behind_reasoning(
    grammar: Grammar, start: ReasoningStart, tokenizer: Tokenizer
) -> Grammar | None:
    """A grammar for reasoning and then what `grammar` says; None where it cannot be put so."""
    answer = _rules_of(grammar)
    if answer is None:
        return None
    closing = tokenizer.token_id(CLOSING)
    thought = "thought_text" + ("" if closing is None else f" | THOUGHT <[{closing}]>")
    opening = tokenizer.token_id(OPENING)
    opened = json.dumps(OPENING) + ("" if opening is None else f" | <[{opening}]>")
    rules = [
        "start: thought GAP answer"
        if start == "opened"
        else "start: answer | opening thought GAP answer",
        f"opening: {opened}",
        f"thought: {thought}",
        f"thought_text[lazy]: THOUGHT {json.dumps(CLOSING)}",
        "THOUGHT: /(.|\\n)*/",
        "GAP: /\\n{0,2}/",
    ]
    return Grammar("lark", "\n".join(rules) + "\n" + answer)


def _rules_of(grammar: Grammar) -> str | None:
    """The same grammar as a rule `answer`, and those that it needs."""
    if grammar.kind in ("json_schema", "json_object"):
        schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.text)
        if not isinstance(schema, dict):
            return None
        options = {"x-guidance": {"whitespace_pattern": " ?"}}
        return f"answer: %json {json.dumps(schema | options)}\n"
    if grammar.kind == "choice":
        return "answer: " + " | ".join(map(json.dumps, json.loads(grammar.text))) + "\n"
    if grammar.kind == "lark" and len(_START_RULE.findall(grammar.text)) == 1:
        return _START_RULE.sub("answer:", grammar.text)
    return None


class Split(NamedTuple):
    reasoning: str
    content: str


class ReasoningText:
    """Splits the text of one candidate as it arrives."""

    __slots__ = ("_buffer", "_state")

    def __init__(self, start: ReasoningStart) -> None:
        self._buffer = ""
        self._state: Literal["may_open", "opened", "gap", "content"] = start

    @property
    def is_reasoning(self) -> bool:
        """Return whether the text so far ends within the reasoning."""
        return self._state == "opened"

    def push(self, text: str, *, ends: bool) -> Split:
        """Take more text; `ends`: it is the last."""
        if self._state == "content":
            return Split("", text)
        self._buffer += text
        reasoning = ""
        if self._state == "may_open":
            begun = self._buffer.lstrip(_GAP)
            if begun.startswith(OPENING):
                self._state, self._buffer = "opened", begun[len(OPENING) :]
            elif OPENING.startswith(begun) and not ends:
                return Split("", "")
            else:
                self._state = "content"
                return self._rest("")
        if self._state == "opened":
            at = self._buffer.find(CLOSING)
            if at < 0:
                held = 0 if ends else _overlap(self._buffer, CLOSING)
                shown = len(self._buffer) - held
                reasoning, self._buffer = self._buffer[:shown], self._buffer[shown:]
                return Split(reasoning, "")
            reasoning, self._buffer = self._buffer[:at], self._buffer[at + len(CLOSING) :]
            self._state = "gap"
        self._buffer = self._buffer.lstrip(_GAP)
        if self._buffer:
            self._state = "content"
        return self._rest(reasoning)

    def _rest(self, reasoning: str) -> Split:
        content, self._buffer = self._buffer, ""
        return Split(reasoning, content)


def _overlap(text: str, marker: str) -> int:
    """Count the characters at the end of the text that may begin the marker."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)
