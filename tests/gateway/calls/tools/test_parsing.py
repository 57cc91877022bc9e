"""Tool calls read from text: each way of writing, cut anywhere, and what is none."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.calls.tools.parsing import (
    MAX_HEAD,
    ArgumentsPiece,
    ContentPiece,
    ToolCallBegin,
    ToolCallReader,
    ToolFormat,
    ToolPiece,
)

NAMES = {"get_weather", "add", "x"}


def read(format: ToolFormat, *texts: str) -> tuple[str, list[tuple[str, str]], list[ToolPiece]]:
    """Content, calls, and the pieces in order."""
    reader = ToolCallReader(format, NAMES)
    pieces: list[ToolPiece] = []
    for text in texts:
        pieces += reader.push(text)
    pieces += reader.finish()
    content, names, arguments = "", [], []
    for piece in pieces:
        if isinstance(piece, ContentPiece):
            assert piece.text
            content += piece.text
        elif isinstance(piece, ToolCallBegin):
            assert piece.call == len(names)
            names.append(piece.name)
            arguments.append("")
        else:
            assert isinstance(piece, ArgumentsPiece)
            # Pieces of a call follow its beginning, and precede the next.
            assert piece.call == len(names) - 1
            arguments[piece.call] += piece.text
    return content, list(zip(names, arguments, strict=True)), pieces


CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text.", "Just text.", []),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "",
     [("add", '{"a": 1}')]),
    ("hermes", 'Well:\n<tool_call>{"name":"add","arguments":{"a":[1,{"b":"}"}]}}</tool_call>',
     "Well:\n", [("add", '{"a":[1,{"b":"}"}]}')]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>\n'
     '{"name": "x", "arguments": {"s": "</tool_call>"}}\n</tool_call>', "",
     [("add", "{}"), ("x", '{"s": "</tool_call>"}')]),
    ("hermes", '<tool_call>{"arguments": {"a": "\\"{"}, "name": "add"}</tool_call>', "",
     [("add", '{"a": "\\"{"}')]),
    ("hermes", '<tool_call>{"name": "x"}</tool_call> Done.', " Done.", [("x", "{}")]),
    ("hermes", '<tool_call>{"name": "x", "arguments": "{\\"a\\": 2}"}</tool_call>', "",
     [("x", '{"a": 2}')]),
    ("hermes", '<tool_call>{"name": "x", "arguments": null}</tool_call>', "", [("x", "{}")]),
    # Arguments by their other name.
    ("hermes", '<tool_call>{"name": "x", "parameters": {"a": 1}}</tool_call>', "",
     [("x", '{"a": 1}')]),
    ("llama", '{"name": "x", "arguments": {"a": 1}}', "", [("x", '{"a": 1}')]),
    # Not calls.
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', []),
    ("hermes", "<tool_call>I would rather not.", "<tool_call>I would rather not.", []),
    ("hermes", "a <tool_ca", "a <tool_ca", []),
    ("hermes", "a <tool_call></tool_call> b", "a <tool_call></tool_call> b", []),
    ("hermes", '<tool_call>{"name": "x", "arguments": 5}</tool_call>',
     '<tool_call>{"name": "x", "arguments": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "x", "arguments": "[1]"}</tool_call>',
     '<tool_call>{"name": "x", "arguments": "[1]"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "x", "arguments": "none"}</tool_call>',
     '<tool_call>{"name": "x", "arguments": "none"}</tool_call>', []),
    # Cut short.
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": "b', "", [("x", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "x"}</tool_', "", [("x", "{}")]),
    ("hermes", '<tool_call>{"name": "x"}</tool_call>\n<tool', "", [("x", "{}")]),
    ("llama", '{"name": "x", "parameters": {}}; ', "", [("x", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "x", "arguments": {}},', "", [("x", "{}")]),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("llama", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; '
     '{"name": "x", "parameters": {}}', "", [("add", '{"a": 1}'), ("x", "{}")]),
    ("llama", '{"answer": {"name": 5}}', '{"answer": {"name": 5}}', []),
    ("llama", "Two {braces}.", "Two {braces}.", []),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "", [("add", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": [1]}}, '
     '{"name": "x", "arguments": {}, "id": "9"}]', "", [("add", '{"a": [1]}'), ("x", "{}")]),
    ("mistral", "[1, 2]", "[1, 2]", []),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
def test_what_a_text_says(
    format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(format, text)[:2] == (content, calls)
    assert read(format, *text)[:2] == (content, calls)


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 120), max_size=5))
def test_it_does_not_matter_where_the_text_is_cut(case: Any, cuts: list[int]) -> None:
    format, text, content, calls = case
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(edges)]
    assert read(format, *parts)[:2] == (content, calls)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    format=st.sampled_from(["hermes", "llama", "mistral"]),
    calls=st.lists(
        st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=4), JSON)),
        min_size=1,
        max_size=3,
    ),
    indent=st.sampled_from([None, 1]),
    cut=st.integers(0, 200),
)
def test_what_was_called_is_read_back(
    format: ToolFormat, calls: list[tuple[str, dict[str, Any]]], indent: int | None, cut: int
) -> None:
    field = "parameters" if format == "llama" else "arguments"
    objects = [json.dumps({"name": n, field: a}, indent=indent, ensure_ascii=False)
               for n, a in calls]  # fmt: skip
    text = {
        "hermes": "\n".join(f"<tool_call>\n{item}\n</tool_call>" for item in objects),
        "llama": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
    }[format]
    content, found, _ = read(format, text[:cut], text[cut:])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@given(
    st.sampled_from(["hermes", "mistral"]), st.text(alphabet='<tool_ca>[]{} TOLSC\n"a', max_size=40)
)
def test_text_without_calls_stays_as_it_is(format: ToolFormat, text: str) -> None:
    content, calls, _ = read(format, *text)
    assert (content, calls) == (text, [])


def test_arguments_come_as_they_are_written() -> None:
    reader = ToolCallReader("hermes", NAMES)
    assert reader.push('Hm <tool_call>\n{"name": "add", "arg') == [ContentPiece("Hm ")]
    assert reader.push('uments": {"a"') == [ToolCallBegin(0, "add"), ArgumentsPiece(0, '{"a"')]
    assert reader.push(": 1}") == [ArgumentsPiece(0, ": 1}")]
    assert reader.push("}\n</tool_call>") == []
    assert reader.finish() == []


@pytest.mark.parametrize("format", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize("step", [1000, 5 * MAX_HEAD])
def test_a_call_without_a_name_is_held_back_up_to_a_bound(format: ToolFormat, step: int) -> None:
    reader = ToolCallReader(format, NAMES)
    opening = {"hermes": "<tool_call>", "llama": "", "mistral": "[TOOL_CALLS]["}[format]
    text = opening + '{"arguments": {"long": "' + "a" * (2 * MAX_HEAD)
    content = ""
    for start in range(0, len(text), step):
        for piece in reader.push(text[start : start + step]):
            assert isinstance(piece, ContentPiece)
            content += piece.text
        held = min(start + step, len(text)) - len(content)
        assert held <= MAX_HEAD + len(opening)
    assert content == text


def test_arguments_are_not_bounded_once_the_name_is_known() -> None:
    arguments = json.dumps({"long": "a" * (2 * MAX_HEAD)})
    text = '<tool_call>{"name": "x", "arguments": ' + arguments + "}</tool_call>"
    assert read("hermes", text[:MAX_HEAD], text[MAX_HEAD:])[:2] == ("", [("x", arguments)])
