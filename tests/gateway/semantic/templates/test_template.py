"""Templates: placeholders only where declared, bytes kept, embedded JSON kept valid."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from harness.work import calls_during
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.exceptions import InvalidRequestError, RequestTooLargeError
from parrot_gateway.semantic.templates import json_text
from parrot_gateway.semantic.templates.body_template import MAX_DEPTH, BodyTemplate
from parrot_gateway.semantic.templates.json_text import (
    Span,
    escape_json,
    find_documents,
    well_formed,
)
from parrot_gateway.semantic.templates.reference import mint_variable_id, reference_of
from parrot_gateway.semantic.templates.text_template import (
    MAX_NESTED_DOCUMENTS,
    Binding,
    Placeholder,
    TextTemplate,
    parse_placeholders,
)

CHAT, COMPLETIONS = "chat", "completions"
V = mint_variable_id()
W = mint_variable_id()
REF, REF2 = reference_of(V), reference_of(W)
NASTY = 'say "hi" \\ \n\t\x00 {{name}} ' + REF2 + " é 😀"

FOREIGN = {
    "jinja": "{% for x in xs %}{{ x.name | upper }}{{- other -}}{{ items[0] }}{% endfor %}",
    "latex": r"\frac{{{a}}}{2} \text{{bold}} $$ \sum_{{i=1}}^{n} {{ {x} }} $$",
    "json": '{"a":{"b":{"c":[[1,2],[3,4]]}},"d":"{{title}}"}',
    "fstring": 'f"{{literal}} {value!r} {{{nested}}}"',
    "mustache": "{{#people}}{{{unescaped}}}{{> partial}}{{! comment }}{{/people}}{{&raw}}",
    "wiki": "[[Page|label]] [[parrot]] [[parrot:]] [[parrot:polly]] {{Infobox}}",
    "unbalanced": "{{name {{ }} }}}} [[ ]] {{na\nme}} {{9x}} {{a-b}} {{}}",
}


# --- placeholders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN.keys())
def test_foreign_braces_pass_untouched(text: str) -> None:
    assert parse_placeholders(text, {"name"}) == [text]
    body = json.dumps({"prompt": text, "messages": [{"content": text}]}, indent=1).encode()
    for path in (CHAT, COMPLETIONS):
        for inputs in ({}, {"name": Binding(value="WRONG")}):
            template = BodyTemplate.of(body, path, inputs)
            assert template.is_constant
            assert template.render({}) is body


def test_declared_names_are_placeholders() -> None:
    text = "{{a}}x{{ b }}{{\ta }}{{c}}{{{a}}}"
    assert parse_placeholders(text, ["a", "b"]) == [
        Placeholder("a"),
        "x",
        Placeholder("b"),
        Placeholder("a"),
        "{{c}}{",
        Placeholder("a"),
        "}",
    ]
    assert parse_placeholders("", ["a"]) == []


def slow_parse(text: str, names: set[str]) -> list[str | Placeholder]:
    """An oracle without regular expressions: at each position, is this a placeholder?"""
    pieces: list[str | Placeholder] = []
    literal, position = "", 0
    while position < len(text):
        end = text.find("}}", position)
        inner = text[position + 2 : end].strip(" \t") if end >= 0 else ""
        if text.startswith("{{", position) and end >= position + 2 and inner in names:
            pieces += ([literal] if literal else []) + [Placeholder(inner)]
            literal, position = "", end + 2
        else:
            literal, position = literal + text[position], position + 1
    return pieces + ([literal] if literal else [])


BRACES = st.lists(
    st.sampled_from(["{", "}", "{{", "}}", "a", "bc", " ", "\t", "{{a}}", "{{ bc }}", "é", "\n"])
).map("".join)


@given(BRACES)
def test_parsing_agrees_with_an_oracle(text: str) -> None:
    assert parse_placeholders(text, {"a", "bc"}) == slow_parse(text, {"a", "bc"})


@given(BRACES)
def test_pieces_lose_nothing(text: str) -> None:
    pieces = parse_placeholders(text, {"a", "bc"})
    assert all(piece for piece in pieces)
    rebuilt = "".join(
        piece if isinstance(piece, str) else "{{" + piece.name + "}}" for piece in pieces
    )
    assert rebuilt == text.replace("{{ bc }}", "{{bc}}") or " " in text or "\t" in text


def test_a_binding_has_exactly_one_source() -> None:
    for arguments in ({}, {"variable_id": V, "value": "x"}):
        with pytest.raises(ValueError, match="bound to"):
            Binding(**arguments)
    assert Binding(value="").value == ""


# --- one text -------------------------------------------------------------------------------------


def render(text: str, *, is_json: bool = False, **values: str) -> str:
    inputs = {name: Binding(value=value) for name, value in values.items()}
    template = TextTemplate.of(text, inputs, is_json=is_json)
    return template.render({V: NASTY, W: "second"})


def test_values_go_in_verbatim_and_are_never_scanned() -> None:
    assert render(f"<{REF}> \"{REF}\" '{REF2}'") == f"<{NASTY}> \"{NASTY}\" 'second'"
    assert render("{{name}}{{other}}", name="{{other}}", other="{{name}}") == "{{other}}{{name}}"


def test_references_in_a_value_given_with_the_request_are_replaced_once() -> None:
    assert render("{{doc}}", doc=f"{REF} {{{{doc}}}}") == f"{NASTY} {{{{doc}}}}"
    template = TextTemplate.of("{{doc}}", {"doc": Binding(value=f"{REF}{REF2}")})
    assert list(template.variables) == [V, W]


def test_a_prompt_that_embeds_json_keeps_it_valid() -> None:
    document = {"text": f"before {REF} after", "list": [REF2, {REF: 1}], "n": 1.5}
    prompt = f'He said "hello [{{ and: {json.dumps(document)}\nAnswer {REF}'
    rendered = render(prompt)
    head, tail = 'He said "hello [{ and: ', f"\nAnswer {NASTY}"
    assert rendered.startswith(head)
    assert rendered.endswith(tail)
    middle = json.loads(rendered[len(head) : -len(tail)])
    assert middle == {"text": f"before {NASTY} after", "list": ["second", {NASTY: 1}], "n": 1.5}


def test_placeholders_are_escaped_where_a_string_of_json_is_nothing_else() -> None:
    text = 'say "hi"\n'
    rendered = render('Read {"a": "{{x}}", "{{x}}": ["{{x}}", "b {{x}}"]} {{x}}', x=text)
    document = json.loads(rendered.removeprefix("Read ").removesuffix(f" {text}"))
    assert document == {"a": text, text: [text, f"b {text}"]}


def test_values_can_be_put_in_as_they_are_everywhere() -> None:
    template = TextTemplate.of(f'{{"a": "{REF}"}}', verbatim=True)
    assert template.render({V: 'say "hi"'}) == '{"a": "say "hi""}'


def test_what_does_not_parse_is_prose() -> None:
    assert render(f'{{"a": "{REF}", }}') == f'{{"a": "{NASTY}", }}'
    assert render(f'{{a: "{REF}"}}') == f'{{a: "{NASTY}"}}'
    assert render(f'"{REF}"') == f'"{NASTY}"'


def test_json_inside_json_inside_json() -> None:
    inner = json.dumps({"deep": REF})
    middle = json.dumps({"inner": inner, "flat": f"a {REF2}"})
    outer = json.dumps({"middle": middle})
    rendered = json.loads(render(f"see {outer}")[4:])
    middle_rendered = json.loads(rendered["middle"])
    assert middle_rendered["flat"] == "a second"
    assert json.loads(middle_rendered["inner"]) == {"deep": NASTY}


@pytest.mark.parametrize("levels", range(1, MAX_NESTED_DOCUMENTS + 2))
def test_documents_in_documents_are_followed_down_to_a_depth(levels: int) -> None:
    text = REF
    for _ in range(levels):
        text = json.dumps({"a": text})
    rendered: Any = render(text)
    for _ in range(min(levels, MAX_NESTED_DOCUMENTS)):
        rendered = json.loads(rendered)["a"]
    if levels <= MAX_NESTED_DOCUMENTS:
        assert rendered == NASTY
    else:
        # One level deeper it is prose.
        assert rendered == json.dumps({"a": REF}).replace(REF, NASTY)


def test_escaped_brackets_inside_json() -> None:
    arguments = json.dumps({"q": f"x{REF}y"}).replace("[", "\\u005b").replace("]", "\\u005D")
    assert json.loads(render(arguments, is_json=True)) == {"q": f"x{NASTY}y"}
    assert json.loads(render(arguments)) == {"q": f"x{NASTY}y"}


def test_json_text_that_is_not_valid_before_its_values_are_in() -> None:
    template = TextTemplate.of(f'{{"n": {REF}, "s": "{REF2}"}}', is_json=True)
    assert json.loads(template.render({V: "42", W: 'a"b'})) == {"n": 42, "s": 'a"b'}
    broken = TextTemplate.of(f'{{"s": "cut {REF}', is_json=True)
    assert broken.render({V: '"'}) == '{"s": "cut \\"'


JSON_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**20), 10**20),
        st.text(max_size=8),
        st.sampled_from([REF, f"a{REF2}\\", '"', "{{name}}", f"[{REF}]", '{"', "[["]),
    ),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=4), st.just(REF)), children, max_size=3),
    ),
    max_leaves=8,
)


def in_every_string(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [in_every_string(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): in_every_string(item, change) for key, item in value.items()}
    return value


def simply_replaced(text: str, values: dict[str, str]) -> str:
    """An oracle for values that hold no reference."""
    for variable_id, value in values.items():
        text = text.replace(reference_of(variable_id), value)
    return text


@given(
    st.one_of(st.lists(JSON_VALUES), st.dictionaries(st.text(max_size=3), JSON_VALUES)),
    st.text(st.sampled_from('x"\\\n\x01é😀{}[],:'), max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_documents_stay_what_the_client_would_have_written(
    document: Any, value: str, ascii_only: bool, is_json: bool
) -> None:
    values = {V: value, W: "second"}
    text = json.dumps(document, ensure_ascii=ascii_only)
    rendered = TextTemplate.of(text, is_json=is_json).render(values)
    expected = in_every_string(document, lambda string: simply_replaced(string, values))
    assert json.loads(rendered) == expected


@given(
    st.text(st.sampled_from('ab"{}[]\\,: \n1'), max_size=30),
    st.text(st.sampled_from('ab"{}[]\\,: \n1'), max_size=30),
)
def test_documents_found_are_documents_and_outermost(before: str, after: str) -> None:
    text = f'{before}{{"key": [1, "{{"]}}{after}'
    spans = find_documents(text).spans
    assert spans == sorted(spans)
    for span, following in pairwise(spans):
        assert span.end <= following.start
    for span in spans:
        assert isinstance(json.loads(text[span.start : span.end]), (dict, list))
    if '"' not in before and not any(c in before for c in "{["):
        assert Span(len(before), len(before) + len('{"key": [1, "{"]}')) in spans


@pytest.mark.parametrize(
    "junk",
    ['{"', '["', "[", '{"a":[', '[{"a":"', '"{', '{"a":"\\"', "[[parrot:", "[1,", '["],["],'],
)
def test_work_grows_with_the_text_and_not_faster(junk: str) -> None:
    work = {}
    for size in (20_000, 80_000):
        text = (junk * size)[:size] + f' "{REF}"'
        documents = find_documents(text)
        work[size] = documents.work
        assert documents.work <= json_text.WORK_FACTOR * len(text) + 4096 + len(text) + 256
    assert work[80_000] <= 4.5 * work[20_000] + 50_000


def test_the_work_bound_notices_a_quadratic_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "WORK_FACTOR", 10**9)
    small, large = (find_documents('{"' * size).work for size in (1_000, 4_000))
    assert large > small * 3.9
    unbounded = find_documents("[" * 400 + '"' + "x" * 100_000).work
    assert unbounded > json_text._WORK_FLOOR + 8 * 100_401


def test_a_document_beyond_the_window_is_prose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "MAX_DOCUMENT", 200)
    document = json.dumps({"pad": "x" * 300, "ref": REF})
    assert render(document).endswith(NASTY + '"}')
    assert json.loads(render(json.dumps({"ref": REF}))) == {"ref": NASTY}


def test_lone_surrogates_become_replacement_characters() -> None:
    template = TextTemplate.of(f'{REF} ["{REF}"]')
    assert template.render({V: "a\ud800b\udc00\ud83d\ude00"}) == (
        'a\ufffdb\ufffd😀 ["a\ufffdb\ufffd😀"]'
    )
    assert render("{{name}}", name="\udfff") == "\ufffd"


@given(st.text(st.characters(), max_size=20))
def test_well_formed_changes_only_what_cannot_be_encoded(text: str) -> None:
    changed = well_formed(text)
    changed.encode()
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert changed == text
    else:
        paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        assert len(changed) == len(paired)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 3))
def test_escaping_is_undone_by_reading(text: str, times: int) -> None:
    escaped = escape_json(text, times)
    for _ in range(times):
        escaped = json.loads(f'"{escaped}"')
    assert escaped == text


def test_insertions_are_bounded() -> None:
    template = TextTemplate.of(f"{REF} and {REF}")
    assert template.render({V: "12345"}, max_characters=10) == "12345 and 12345"
    with pytest.raises(RequestTooLargeError, match="9 characters"):
        template.render({V: "12345"}, max_characters=9)
    escaped = TextTemplate.of(f'["{REF}"]')
    assert escaped.render({V: "\x00"}, max_characters=6) == '["\\u0000"]'
    with pytest.raises(RequestTooLargeError):
        escaped.render({V: "\x00"}, max_characters=5)


def test_a_missing_value_is_the_caller_s_mistake() -> None:
    with pytest.raises(KeyError):
        TextTemplate.of(REF).render({})


# --- bodies ---------------------------------------------------------------------------------------


def test_all_texts_of_a_chat_body() -> None:
    message: dict[str, Any] = {
        "role": "assistant",
        "name": REF,
        "content": [
            {"type": "text", "text": REF},
            {"type": "image_url", "image_url": {"url": REF}},
            {"type": "refusal", "refusal": REF},
        ],
        "refusal": REF,
        "reasoning_content": REF,
        "tool_calls": [
            {"id": REF, "function": {"name": REF, "arguments": json.dumps({"q": REF})}},
            {"type": "custom", "custom": {"name": "c", "input": f'"{REF}"'}},
        ],
        "function_call": {"name": "f", "arguments": json.dumps([REF])},
    }
    body = {
        "model": REF,
        "messages": [{"role": "system", "content": f"s {REF}"}, message, {"content": None}, 7],
        "prediction": {"type": "content", "content": REF},
        "tools": [{"function": {"description": REF}}],
        "stop": [REF],
        "metadata": {"k": REF},
    }
    rendered = json.loads(BodyTemplate.of(json.dumps(body).encode(), CHAT).render({V: NASTY}))
    expected = json.loads(json.dumps(body))
    expected["messages"][0]["content"] = f"s {NASTY}"
    changed = expected["messages"][1]
    changed["content"][0]["text"] = changed["content"][2]["refusal"] = NASTY
    changed["refusal"] = changed["reasoning_content"] = NASTY
    changed["tool_calls"][0]["function"]["arguments"] = json.dumps({"q": NASTY}, ensure_ascii=False)
    changed["tool_calls"][1]["custom"]["input"] = f'"{NASTY}"'
    changed["function_call"]["arguments"] = json.dumps([NASTY], ensure_ascii=False)
    expected["prediction"]["content"] = NASTY
    assert rendered == expected


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (COMPLETIONS, {"prompt": REF, "suffix": REF}, {"prompt": "X", "suffix": "X"}),
        (COMPLETIONS, {"prompt": [REF, "b", [1, 2]]}, {"prompt": ["X", "b", [1, 2]]}),
        (COMPLETIONS, {"messages": [{"content": REF}]}, None),
        ("embeddings", {"input": [REF, "b"]}, {"input": ["X", "b"]}),
        ("responses", {"input": REF, "instructions": REF}, {"input": "X", "instructions": "X"}),
        (
            "responses",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": REF}]},
                    {"type": "function_call", "arguments": json.dumps({"a": REF})},
                    {"type": "function_call_output", "output": REF},
                ]
            },
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "X"}]},
                    {"type": "function_call", "arguments": '{"a": "X"}'},
                    {"type": "function_call_output", "output": "X"},
                ]
            },
        ),
        ("moderations", {"input": REF}, None),
    ],
)
def test_texts_by_kind(kind: str, body: dict[str, Any], expected: dict[str, Any] | None) -> None:
    raw = json.dumps(body).encode()
    template = BodyTemplate.of(raw, kind)
    if expected is None:
        assert template.render({}) is raw
    else:
        assert template.variables == {V}
        assert json.loads(template.render({V: "X"})) == expected


def test_every_other_value_keeps_its_bytes() -> None:
    odd = rb'{ "b" : [1.50, 1e400 ,12345678901234567890, -0.0,"\u00e9\/"], "a":"\ud83d\ude00"}'
    body = b'{"x": ' + odd + b', "prompt": ["' + REF.encode() + b'", "\\u00e9\\/"], "t":1.0}'
    template = BodyTemplate.of(body, COMPLETIONS)
    assert template.render({V: "é"}) == (
        b'{"x":' + odd + b',"prompt":["' + "é".encode() + b'","\\u00e9\\/"],"t":1.0}'
    )


def test_fields_can_be_left_out() -> None:
    body = b'{"parrot": {"session": "s"}, "prompt": "p", "n": 1.0}'
    template = BodyTemplate.of(body, COMPLETIONS, without=("parrot", "absent"))
    assert template.is_constant
    assert template.render({}) == b'{"prompt":"p","n":1.0}'
    assert BodyTemplate.of(body, COMPLETIONS, without=("absent",)).render({}) is body


def test_places_stay_when_fields_are_left_out() -> None:
    body = json.dumps({"parrot": {"session": "s"}, "prompt": f"a {REF}", "n": 1}).encode()
    template = BodyTemplate.of(body, COMPLETIONS, without=("parrot",))
    assert json.loads(template.render({V: "b"})) == {"prompt": "a b", "n": 1}


def test_any_value_is_followed_down_to_a_depth() -> None:
    deepest = b"[" * MAX_DEPTH + json.dumps(REF).encode() + b"]" * MAX_DEPTH
    assert json.loads(BodyTemplate.everywhere(deepest).render({V: "b"}))
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        BodyTemplate.everywhere(b"[" + deepest + b"]")


def test_names_are_accounted_for() -> None:
    body = json.dumps({"prompt": ["{{a}} {{x}}", "{{ a }}{{b}}", "{{y}}"], "user": "{{c}}"})
    inputs = {"a": Binding(variable_id=V), "b": Binding(value="B"), "c": Binding(value="C")}
    template = BodyTemplate.of(body.encode(), COMPLETIONS, inputs)
    assert template.undeclared == {"x", "y"}
    assert template.unused == {"c"}
    assert template.variables == {V}
    assert json.loads(template.render({V: "A"})) == {
        "prompt": ["A {{x}}", "AB", "{{y}}"],
        "user": "{{c}}",
    }
    assert BodyTemplate.of(body.encode(), COMPLETIONS).undeclared == frozenset()


def test_escaped_text_in_the_body_is_found() -> None:
    body = json.dumps({"prompt": f"{{{{n}}}} {REF}"})
    for plain, escaped in (("[", "\\u005b"), ("]", "\\u005D"), ("{", "\\u007b"), ("}", "\\u007D")):
        body = body[:1] + body[1:-1].replace(plain, escaped) + body[-1:]
    template = BodyTemplate.of(body.encode(), COMPLETIONS, {"n": Binding(value="N")})
    assert json.loads(template.render({V: "X"})) == {"prompt": "N X"}
    braces = BodyTemplate.of(b'{"prompt": "\\u007b{n}}"}', COMPLETIONS, {"n": Binding(value="N")})
    assert braces.render({}) == b'{"prompt":"N"}'


def test_lone_surrogates_in_a_body() -> None:
    body = rb'{"user": "\ud83d\ude00 \\ud800", "prompt": "\ud800 ' + REF.encode() + rb'\udc00"}'
    template = BodyTemplate.of(body, COMPLETIONS)
    assert json.loads(template.render({V: "\udfff"})) == {
        "user": "😀 \\ud800",
        "prompt": "\ufffd \ufffd\ufffd",
    }


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "parse"),
        (b'{"prompt": }', "parse"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"x": "\xed\xa0\x80"}', "UTF-8"),
        (b'["[[parrot:"]', "object"),
        (b'{"prompt":' + b"[" * 100_000, "nested"),
    ],
)
def test_bodies_that_are_no_json_object(body: bytes, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        BodyTemplate.of(body, COMPLETIONS)


@pytest.mark.parametrize("wrong", [None, 1, {"a": REF}, [[REF]], {"content": REF}])
def test_bodies_of_a_wrong_shape_are_left_to_validation(wrong: Any) -> None:
    body = json.dumps({"prompt": wrong, "messages": wrong}).encode()
    assert BodyTemplate.of(body, COMPLETIONS).render({}) is body
    assert BodyTemplate.of(body, CHAT).render({}) is body


def test_bodies_are_bounded() -> None:
    body = json.dumps({"prompt": [REF] * 100}).encode()
    template = BodyTemplate.of(body, COMPLETIONS)
    assert len(template.render({V: "x" * 10}, max_characters=1000)) > 1000
    with pytest.raises(RequestTooLargeError):
        template.render({V: "x" * 10}, max_characters=999)


@given(JSON_VALUES, st.text(st.sampled_from('x"\\\né'), max_size=4))
def test_every_string_of_a_json_value(document: Any, value: str) -> None:
    def change(string: str) -> str:
        return TextTemplate.of(string).render({V: value, W: "second"})

    def in_values(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: in_values(item) for key, item in node.items()}
        if isinstance(node, list):
            return [in_values(item) for item in node]
        return change(node) if isinstance(node, str) else node

    template = BodyTemplate.everywhere(json.dumps(document).encode())
    assert json.loads(template.render({V: value, W: "second"})) == in_values(document)


def test_references_far_down_are_refused() -> None:
    assert BodyTemplate.everywhere(b"[" * 60 + f'"{REF}"'.encode() + b"]" * 60).variables == {V}
    with pytest.raises(InvalidRequestError, match="nested"):
        BodyTemplate.everywhere(b"[" * 90 + f'"{REF}"'.encode() + b"]" * 90)


def test_attempts_at_finding_documents_are_bounded() -> None:
    text = '{"' * 40_000
    assert calls_during(lambda: find_documents(text)) < len(text) / 4


@pytest.mark.parametrize(
    "unit",
    [
        {"role": "user", "content": f"word {REF} {{{{x}}}}"},
        {"role": "user", "content": json.dumps({"a": REF, "b": ["{{x}}", '"']})},
        {"role": "user", "content": "{{ [[parrot: \\u005b"},
    ],
)
def test_compiling_and_rendering_do_linear_work(unit: dict[str, str]) -> None:
    inputs = {"x": Binding(value="1")}
    work = {}
    for size in (50, 200):
        body = json.dumps({"messages": [unit] * size}).encode()
        joined = json.dumps({"prompt": unit["content"] * size}).encode()

        def everything(body: bytes = body, joined: bytes = joined) -> None:
            BodyTemplate.of(body, CHAT, inputs).render({V: "v"})
            BodyTemplate.of(joined, COMPLETIONS, inputs).render({V: "v"})

        work[size] = calls_during(everything)
    assert 2 < work[200] / work[50] < 4.5
