"""Docstrings as templates: declared names only, and prompts that the server reads the same way."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from parrot_functions._template import Placeholder, parse_template, render, write_prompt

from parrot_gateway.semantic.templates.body_template import BodyTemplate
from parrot_gateway.semantic.templates.text_template import Binding, parse_placeholders
from parrot_gateway.semantic.templates.text_template import Placeholder as ServerPlaceholder

# NOTE: no quotes: values in a string of a JSON document are escaped, on purpose.
texts = st.text(alphabet="{} ab_c\t\\\n[]", max_size=30)
pieces = st.lists(st.one_of(texts, st.sampled_from("abc").map(Placeholder)), max_size=8)


def test_only_declared_names_are_placeholders() -> None:
    text = 'A {{ topic }}, {{other}}, {topic}, \\frac{{a}}{{b}}, {"a": {"b": {}}}, {{{topic}}}.'
    assert parse_template(text, ["topic"]) == [
        "A ",
        Placeholder("topic"),
        ', {{other}}, {topic}, \\frac{{a}}{{b}}, {"a": {"b": {}}}, {',
        Placeholder("topic"),
        "}.",
    ]


@given(text=texts, names=st.sets(st.sampled_from(["a", "b", "_c"])))
def test_templates_are_read_as_the_server_reads_them(text: str, names: set[str]) -> None:
    theirs = [
        Placeholder(p.name) if isinstance(p, ServerPlaceholder) else p
        for p in parse_placeholders(text, names)
    ]
    assert parse_template(text, names) == theirs


def test_rendered_values_are_not_parsed() -> None:
    found = render(parse_template("{{n}} of {{a}}", ["n", "a"]), {"n": "{{a}}"})
    assert found == ["{{a}} of ", Placeholder("a")]


def test_prompts_without_inputs_are_plain() -> None:
    assert write_prompt(["{{x}} and {{y}}"]) == ("{{x}} and {{y}}", (), {})


def test_look_alikes_are_told_apart_from_placeholders() -> None:
    prompt = write_prompt(["{{x}} ", Placeholder("a"), "{{a}}"])
    assert prompt.text == "{{opening_braces}}x}} {{a}}{{opening_braces}}a}}"
    assert prompt.inputs == ("a",)
    assert prompt.values == {"opening_braces": "{{"}


@given(pieces=pieces, values=st.fixed_dictionaries({"a": texts, "b": texts, "c": texts}))
def test_the_server_renders_what_was_meant(
    pieces: list[str | Placeholder], values: dict[str, str]
) -> None:
    """Literals may hold any braces, wherever they meet."""
    meant = "".join(values[p.name] if isinstance(p, Placeholder) else p for p in pieces)
    prompt = write_prompt(pieces)
    sent = {**{name: values[name] for name in prompt.inputs}, **prompt.values}
    template = BodyTemplate.of(
        json.dumps({"prompt": prompt.text}).encode(),
        "completions",
        {name: Binding(value=value) for name, value in sent.items()},
    )
    assert not template.undeclared
    assert not template.unused
    assert json.loads(template.render({}))["prompt"] == meant


def test_an_input_of_the_name_that_stands_for_braces() -> None:
    prompt = write_prompt(["{{a}} ", Placeholder("opening_braces")])
    assert prompt.text == "{{opening_braces_}}a}} {{opening_braces}}"
    assert prompt.inputs == ("opening_braces",)
    assert prompt.values == {"opening_braces_": "{{"}
