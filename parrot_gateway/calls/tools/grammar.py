"""Grammars that keep a model to calls of given tools, in Lark's notation as the engine takes it.

The parts that all calls share are literal text, so that a model need not find them; the arguments
of each tool are a separate JSON schema, whose references stay valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from parrot_engine.protocol import Grammar
from parrot_engine.text import Tokenizer

from parrot_gateway.calls.schemas import as_meant
from parrot_gateway.calls.tools.definitions import Tool
from parrot_gateway.calls.tools.parsing import RAW_CLOSING, RAW_OPENING, WRITINGS, ToolFormat

#: Calls in one answer where a model is kept to them.
MAX_CALLS = 16
#: As in the engine: nothing or a space.
_WHITESPACE = " ?"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def calls_grammar(
    tools: Sequence[Tool],
    format: ToolFormat,
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    content: Grammar | None = None,
) -> Grammar:
    """Build a grammar that allows calls only: one, or with `parallel` up to `MAX_CALLS`.

    Args:
        tools: at least one.
        format: how the model writes calls.
        tokenizer: knows whether that takes special tokens.
        parallel: several calls may be made at once.
        content: instead of any call the answer may be JSON of this schema.
    """
    writing = WRITINGS[format]
    rules = [*_body_rules(tools, writing.arguments, every=True)]
    more = MAX_CALLS - 1 if parallel else 0
    if writing.opening:
        rules += [f"open: {_marker(writing.opening, tokenizer)}"]
    if writing.opening and not writing.separator:
        rules.insert(0, f"call: open {_text(writing.inner_opening)} body {_text(writing.closing)}")
        calls = f'calls: call ("\\n" call){{0,{more}}}' if more else "calls: call"
    else:
        inner = f"body ({_text(writing.separator)} body){{0,{more}}}" if more else "body"
        opening = f"open {_text(writing.inner_opening)} " if writing.opening else ""
        closing = f" {_text(writing.closing)}" if writing.closing else ""
        calls = f"calls: {opening}{inner}{closing}"
    start = "start: calls" if content is None else "start: calls | content"
    if content is not None:
        schema = _ANY_OBJECT if content.kind == "json_object" else json.loads(content.text)
        rules.append(f"content: %json {_schema(schema)}")
    return Grammar("lark", "\n".join([start, calls, *rules]) + "\n")


def optional_calls_grammar(
    tools: Sequence[Tool], format: ToolFormat, tokenizer: Tokenizer
) -> Grammar | None:
    """Any text, but once a call begins it is one of the tools', with valid arguments where the tool
    is strict; None for a format whose calls no marker announces."""
    writing = WRITINGS[format]
    if not writing.opening:
        return None
    rules = [
        "start: tag* tail",
        "tail: TEXT",
        f"tag: trigger {_text(writing.inner_opening)} inner {_text(writing.closing)}",
        f"tag_text[lazy]: TEXT {_text(writing.opening)}",
        "TEXT: /(.|\\n)*/",
    ]
    separator = writing.separator
    more = f" ({_text(separator)} body){{0,{MAX_CALLS - 1}}}" if separator else ""
    rules.append(f"inner: body{more}")
    token_id = tokenizer.token_id(writing.opening)
    rules.append("trigger: tag_text" + ("" if token_id is None else f" | TEXT <[{token_id}]>"))
    rules += _body_rules(tools, writing.arguments, every=False)
    return Grammar("lark", "\n".join(rules) + "\n")


def _body_rules(tools: Sequence[Tool], arguments: str, *, every: bool) -> list[str]:
    """Rules of one call and of each tool's arguments; `every`: as if all were strict."""
    bodies, rules = [], []
    for number, tool in enumerate(tools):
        if tool.input_grammar is not None:
            begin = f'{{"name": {json.dumps(tool.name)}, "input": {RAW_OPENING}'
            bodies.append(f"{_text(begin)} args_{number} {_text(RAW_CLOSING)}")
            rules.append(f"args_{number}: %lark {{\n{tool.input_grammar}\n}}")
            continue
        begin = f'{{"name": {json.dumps(tool.name)}, "{arguments}": '
        bodies.append(f'{_text(begin)} args_{number} "}}"')
        schema = (tool.parameters or _ANY_OBJECT) if every or tool.strict else _ANY_OBJECT
        rules.append(f"args_{number}: %json {_schema(as_meant(schema))}")
    return ["body: " + " | ".join(bodies), *rules]


def _marker(marker: str, tokenizer: Tokenizer) -> str:
    """A marker as text, or as the one token that it may be."""
    token_id = tokenizer.token_id(marker)
    if token_id is None:
        return _text(marker)
    if tokenizer.is_special(token_id):
        return f"<[{token_id}]>"
    return f"{_text(marker)} | <[{token_id}]>"


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}})


def _text(text: str) -> str:
    return json.dumps(text)
