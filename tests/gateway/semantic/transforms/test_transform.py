"""Transforms: the grammar and its errors, every function, bounds, and the documentation."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.work import calls_during
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.exceptions import TransformError, TransformSyntaxError
from parrot_gateway.semantic.transforms import functions, grammar
from parrot_gateway.semantic.transforms.functions import FUNCTIONS
from parrot_gateway.semantic.transforms.grammar import parse_pipeline
from parrot_gateway.semantic.transforms.transform import parse_transform

DOCUMENT = (Path(__file__).parents[4] / "docs" / "transforms.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r'("(?:[^"\\]|\\.)*") +-> (.+?) +-> (error|"(?:[^"\\]|\\.)*")')
EXAMPLES = DOCUMENT.split("```transforms\n")[1].split("```\n\n## ")[0].splitlines()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def quoted(text: str) -> str:
    """A text as a string of the grammar: every character in the form that cannot be mistaken."""
    return "'" + "".join(f"\\U{ord(character):08x}" for character in text) + "'"


# --- documentation --------------------------------------------------------------------------------


def test_the_documentation_lists_exactly_the_functions() -> None:
    table = DOCUMENT.split("## Functions")[1].split("## Examples")[0]
    documented = re.findall(r"^\| `([^`]+)` \| \S", table, re.MULTILINE)
    assert documented == [function.signature for function in FUNCTIONS.values()]
    assert list(FUNCTIONS) == sorted(FUNCTIONS)


def test_the_documented_bounds_are_the_real_ones() -> None:
    for bound in (
        f"{grammar.MAX_CHARACTERS:,} characters and {grammar.MAX_STEPS} steps",
        f"{functions.MAX_ITEMS:,} texts",
        f"{functions.MAX_PATTERN_SIZE:,} instructions",
        f"{functions.MAX_PATTERN_WORK // 10**6} million",
    ):
        assert bound in DOCUMENT


def test_the_documented_grammar_is_that_of_the_module() -> None:
    rules = re.compile(r"^ *(pipeline|step|argument|value|word) +=.*$", re.MULTILINE)
    documented = [match[0] for match in rules.finditer(DOCUMENT)]
    assert len(documented) == 5
    assert documented == [match[0].strip() for match in rules.finditer(grammar.__doc__ or "")]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_true(example: str) -> None:
    match = EXAMPLE.fullmatch(example)
    assert match is not None
    transform = parse_transform(match[2])
    if match[3] == "error":
        with pytest.raises(TransformError):
            transform.apply(json.loads(match[1]))
    else:
        assert transform.apply(json.loads(match[1])) == json.loads(match[3])


def test_every_function_has_an_example() -> None:
    shown = {call.name for line in EXAMPLES for call in parse_pipeline(EXAMPLE.fullmatch(line)[2])}  # type: ignore[index]
    assert shown == set(FUNCTIONS)


# --- grammar --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("", 0, "the name of a function"),
        ("  ", 2, "the name of a function"),
        ("strip |", 7, "the name of a function"),
        ("| strip", 0, "the name of a function"),
        ("strip strip", 6, "'|' or the end"),
        ("strip)", 5, "'|' or the end"),
        ("take(1", 6, "',' or ')'"),
        ("take(1 2)", 7, "',' or ')'"),
        ("split(,)", 6, "an argument"),
        ("split(';',)", 10, "an argument"),
        ("split(a=)", 8, "an argument"),
        ("split('a", 6, "a closing '"),
        ('split("a\\"', 6, 'a closing "'),
        (r"split('\xg0')", 7, "2 hexadecimal digits"),
        (r"split('\ud800')", 7, "Unicode character"),
        (r"split('\U00110000')", 7, "Unicode character"),
        ("strip | shout", 8, "one of the functions code_block, first, join, json, last, lines"),
        ("Strip", 0, "one of the functions"),
        ("__import__('os')", 0, "one of the functions"),
        ("take", 0, "take(n) with an argument n"),
        ("take(1, 2)", 8, "the arguments of take(n)"),
        ("lower(1)", 6, "the arguments of lower"),
        ("take(m=1)", 5, "the arguments of take(n)"),
        ("take(1, n=2)", 8, "n only once"),
        ("take('1')", 5, "a whole number for n"),
        ("take(1.5)", 5, "a whole number for n"),
        ("take(-1)", 5, "at least 0"),
        ("take(1234567890)", 5, "at most 9 digits"),
        ("lines(0)", 6, "positions count from 1"),
        ("lines(1, 0)", 9, "positions count from 1"),
        ("split(';', 0)", 11, "positions count from 1"),
        ("split('')", 6, "not empty"),
        ("replace('', x)", 8, "not empty"),
        ("json(a)", 5, "a JSON pointer"),
        ("json('/a~2')", 5, "a JSON pointer"),
        ("json(" + "/a" * 65 + ")", 5, "at most 64 levels"),
        ("regex('(')", 6, "missing )"),
        (r"regex('(a)\1')", 6, "RE2's syntax"),
        ("regex('(?=a)')", 6, "RE2's syntax"),
        ("regex('(((a{100}){100}){100})')", 6, "RE2's syntax"),
        ("regex('(a)', 2)", 13, "0 to 1"),
        ("regex('(?P<x>a)', y)", 18, "0 to 1, x"),
        ("regex('a', -1)", 11, "a group"),
        ("template('no place')", 9, "{{value}}"),
        ("truncate(5)", 9, "truncate(chars=…, tokens=…)"),
        ("truncate", 0, "either"),
        ("truncate(chars=1, tokens=1)", 0, "either"),
        ("truncate(chars=-1)", 9, "at least 0"),
        ("strip|" * 64 + "strip", 384, "at most 64 steps"),
        ("strip" + " " * 9000, 8192, "at most 8192 characters"),
    ],
)
def test_mistakes_are_named_with_their_place(text: str, position: int, expected: str) -> None:
    with pytest.raises(TransformSyntaxError) as caught:
        parse_transform(text)
    error = caught.value
    assert (error.position, error.status, error.code) == (position, 400, "transform_syntax")
    assert expected in error.expected
    assert f"at character {position}" in error.message
    assert error.expected in error.message


def test_an_unknown_function_is_told_all_functions() -> None:
    with pytest.raises(TransformSyntaxError) as caught:
        parse_transform("nope")
    assert all(name in caught.value.message for name in FUNCTIONS)


@given(st.text(st.sampled_from("striplnejoaks()|,='\"\\ux /12{}."), max_size=25))
def test_no_text_breaks_the_parser(text: str) -> None:
    complaint: TransformSyntaxError | None = None
    try:
        parse_transform(text)
    except TransformSyntaxError as error:
        complaint = error
    assert complaint is None or 0 <= complaint.position <= len(text)


@given(TEXTS)
def test_any_text_can_be_an_argument(text: str) -> None:
    doubled = text.replace("\\", "\\\\")
    for source in (
        quoted(text),
        "'" + doubled.replace("'", "\\'") + "'",
        '"' + doubled.replace('"', '\\"') + '"',
    ):
        (call,) = parse_pipeline(f"f ( {source} )")
        assert call.arguments[0].value == text
        assert call.source == f"f ( {source} )"


def test_other_backslashes_stay() -> None:
    (call,) = parse_pipeline(r"""f('\d\.\w\q', "\'\t")""")
    assert [argument.value for argument in call.arguments] == [r"\d\.\w\q", "'\t"]


# --- functions, against Python's own --------------------------------------------------------------


def run(transform: str, text: str) -> str:
    return parse_transform(transform).apply(text)


@given(TEXTS, TEXTS.filter(bool), TEXTS)
def test_text_functions(text: str, some: str, other: str) -> None:
    assert run("strip", text) == text.strip()
    assert run("lower|upper", text) == text.lower().upper()
    assert run(f"strip({quoted(some)})", text) == text.strip(some)
    assert run(f"replace({quoted(some)}, {quoted(other)})", text) == text.replace(some, other)
    assert run("truncate(chars=7)", text) == text[:7]
    place = quoted("{{value}}" + other.replace("{", "(") + "{{ value }}")
    assert run(f"template({place})", text) == text + other.replace("{", "(") + text


@given(
    st.text(st.sampled_from("ab;\n\r "), max_size=20),
    st.integers(-6, 6).filter(bool),
    st.integers(-6, 6).filter(bool),
)
def test_list_functions(text: str, start: int, end: int) -> None:
    lines = re.split("\r\n|\n|\r", text)
    if not lines[-1]:
        lines.pop()
    parts = text.split(";")
    first = start if start > 0 else max(1, len(lines) + 1 + start)
    last = end if end > 0 else len(lines) + 1 + end
    assert run(f"lines({start}, {end})", text) == "\n".join(lines[first - 1 : max(last, 0)])
    assert run("lines | join('')", text) == "".join(lines)
    assert run(f"first({abs(start)})", text) == "\n".join(lines[: abs(start)])
    assert run(f"last({abs(start)})", text) == "\n".join(lines[-abs(start) :])
    assert run("last(0)", text) == run("take(0)", text) == ""
    assert run("split(';') | join(';')", text) == text
    assert run("split(';') | split(a) | upper", text) == "\n".join(
        piece.upper() for part in parts for piece in part.split("a")
    )
    if abs(start) <= len(parts):
        wanted = parts[start - 1] if start > 0 else parts[start]
        assert run(f"split(';', {start})", text) == wanted
    else:
        with pytest.raises(TransformError, match=f"only {len(parts)}"):
            run(f"split(';', {start})", text)


@given(
    st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False, allow_infinity=False),
            TEXTS,
        ),
        lambda below: st.one_of(
            st.lists(below, min_size=1, max_size=3),
            st.dictionaries(st.text(st.sampled_from("a/~é \"'"), max_size=3), below, min_size=1),
        ),
        max_leaves=8,
    ),
    st.data(),
)
def test_json_pointers(document: object, data: st.DataObject) -> None:
    value, pointer = document, ""
    while isinstance(value, (list, dict)) and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(range(len(value)) if isinstance(value, list) else [*value]))
        pointer += "/" + str(key).replace("~", "~0").replace("/", "~1")
        value = value[key]
    result = run(f"json({quoted(pointer)})", f" {json.dumps(document, indent=1)}\n")
    if isinstance(value, str):
        assert result == value
    else:
        assert json.loads(result) == value


def test_json_keeps_what_is_written() -> None:
    assert run("json(/a)", '{"b":"\\ud800", "a": [1.0, 1e999,\n"\\u00e9"]}') == (
        '[1.0, 1e999,\n"\\u00e9"]'
    )
    assert run("json(/b)", '{"b":"x\\ud800\\ud83d\\ude00"}') == "x\ufffd😀"
    assert run("json(/a)", '{"a": 1, "a": 2}') == "2"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("{'a': 1}", "not JSON"),
        ('{"a": 1} and more', "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"b": 1}', "no field 'a' (fields: b)"),
        ("[1]", "no item 'a' in an array of 1"),
        ("1", "neither object nor array"),
    ],
)
def test_json_that_does_not_fit(text: str, reason: str) -> None:
    with pytest.raises(TransformError) as caught:
        run("strip | json(/a)", text)
    error = caught.value
    assert reason in error.message
    assert (error.status, error.code, error.step) == (422, "transform_failed", "json(/a)")
    assert error.should_retry is False


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("```\na\n\nb\n```", "", "a\n\nb"),
        ("````md\n```\nx\n```\n````", "", "```\nx\n```"),
        ("~~~ JSON title\n1\n~~~~", "json", "1"),
        ("```js\n1\n```\n\n  ```json\n2\n  ```", "json", "2"),
        ("```c++\nx\r\n```", "c++", "x"),
        ("```json\ncut off", "json", "cut off"),
        ("```\n```", "", ""),
        ("```inline``` text\n```\nreal\n```", "", "real"),
        ("```js\n```json\n```", "", "```json"),
    ],
)
def test_code_blocks(text: str, language: str, expected: str) -> None:
    assert run(f"code_block({language})" if language else "code_block", text) == expected


def test_a_group_that_took_no_part() -> None:
    with pytest.raises(TransformError, match="took no part"):
        run("regex('a|(b)', 1)", "a")
    assert run("regex('()')", "x") == ""
    assert run("regex('(?s)b.*', 0)", "é語b😀\nc") == "b😀\nc"


@given(st.text(st.sampled_from("ab1 é😀\n"), max_size=20))
def test_patterns_agree_with_python(text: str) -> None:
    for pattern in ("[ab]+(1?)", "(é|😀)", "a.b", "b$"):
        match = re.search(pattern.replace("$", r"\Z"), text)
        if match is None:
            with pytest.raises(TransformError, match="does not match"):
                run(f"regex({quoted(pattern)})", text)
        else:
            assert run(f"regex({quoted(pattern)})", text) == match[0]


def test_truncating_by_tokens() -> None:
    transform = parse_transform("truncate(tokens=2)")
    assert transform.needs_tokens
    assert not parse_transform("truncate(chars=2)").needs_tokens
    cut: Callable[[str, int], str] = lambda text, number: " ".join(text.split()[:number])  # noqa: E731
    assert transform.apply("one two three", cut_tokens=cut) == "one two"
    with pytest.raises(TransformError, match=r"use truncate\(chars=…\)"):
        transform.apply("one two three")


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transform",
    [
        "template('{{value}}{{value}}')",
        "replace(a, bb)",
        "split('') | join('12')".replace("''", "a"),
        "split(a) | template('{{value}}xx')",
        "replace(a, 'ß') | upper",
        "split(a) | template('ß') | upper".replace("'ß'", "'{{value}}ß'"),
        "lines | template('{{value}}a')",
    ],
)
def test_results_are_bounded(transform: str) -> None:
    parsed = parse_transform(transform)
    result = parsed.apply("a" * 10)
    assert len(result) > 10
    assert parsed.apply("a" * 10, max_characters=len(result)) == result
    with pytest.raises(TransformError, match="longer than 10 characters"):
        parsed.apply("a" * 10, max_characters=10)


def test_a_list_at_the_end_is_bounded_with_its_line_ends() -> None:
    parsed = parse_transform("split(',')")
    assert parsed.apply(",,,", max_characters=3) == "\n\n\n"
    with pytest.raises(TransformError, match="longer than 2 characters"):
        parsed.apply(",,,", max_characters=2)


def test_an_explosion_is_stopped_before_it_happens() -> None:
    bomb = " | ".join(["template('" + "{{value}}" * 100 + "')"] * 8)
    with pytest.raises(TransformError, match="longer than"):
        run(bomb, "x" * 1000)


@pytest.mark.parametrize(
    "transform",
    [
        "template('" + "{{value}}" * 40 + "')",
        "replace(a, bbbbbbbbbbbbbbbbbbbb)",
        f"lines | join({'b' * 500})",
    ],
)
def test_results_that_are_too_long_are_not_made(transform: str) -> None:
    parsed = parse_transform(transform)
    text = "a" * 1_000_000 if "lines" not in transform else "\n" * 99_000
    tracemalloc.start()
    try:
        with pytest.raises(TransformError, match="longer than"):
            parsed.apply(text, max_characters=1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000


def test_lists_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MAX_ITEMS", 5)
    assert run("split(',') | join('')", "," * 4) == ""
    for transform in ("split(',')", "lines | split(',')"):
        with pytest.raises(TransformError, match="more than 5"):
            run(transform, "," * 5)
    with pytest.raises(TransformError, match="more than 5"):
        run("lines", "\n" * 9)


def test_patterns_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransformSyntaxError, match="instructions"):
        parse_transform(r"regex('(\pL\pN){20}')")
    monkeypatch.setattr(functions, "MAX_PATTERN_WORK", 1000)
    assert run("regex(a)", "xa") == "a"
    with pytest.raises(TransformError, match="too long for this pattern"):
        run("regex(a)", "x" * 1000)
    # What counts is the work, and that goes by bytes: four for each of these.
    size = functions.compile_pattern("a").programsize
    monkeypatch.setattr(functions, "MAX_PATTERN_WORK", size * 400)
    assert run("regex(a)", "😀" * 99 + "a") == "a"
    with pytest.raises(TransformError, match="a text of 101 characters is too long"):
        run("regex(a)", "😀" * 100 + "a")


def test_lone_surrogates_become_replacement_characters() -> None:
    for transform in ("strip", "regex('.+')", "lower | lines", "template('{{value}}')"):
        assert run(transform, "a\ud800b") == "a\ufffdb"


def test_errors_show_no_more_than_the_beginning_of_a_step() -> None:
    with pytest.raises(TransformError) as caught:
        run(f"regex('{'x' * 500}')", "y")
    assert len(caught.value.step) <= 80
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "transform",
    [
        "code_block(x)",
        "lines | upper",
        "split(a) | template('{{value}}') | join(b)",
        "replace(a,b)",
    ],
)
def test_functions_do_linear_work(transform: str) -> None:
    parsed = parse_transform(transform)
    work = [
        calls_during(lambda size=size: parsed.apply("```\na\n" * size + "```x\n"))
        for size in (250, 1000)
    ]
    assert work[1] < 4.5 * work[0]
