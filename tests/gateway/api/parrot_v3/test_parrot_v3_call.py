"""Parrot's own API without a server: templates become chains of calls, bodies become fields."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from harness.gateway.parrot_v3_client import SAMPLING
from hypothesis import given
from hypothesis import strategies as st
from parrot_scheduler.task import LATENCY, THROUGHPUT, Objective

from parrot_gateway.api.parrot_v3.bodies import (
    SamplingConfig,
    SemanticCallBody,
    check_call,
    max_tokens,
    sampling_fields,
    session_number,
)
from parrot_gateway.calls.requests.call import decode
from parrot_gateway.exceptions import (
    InvalidRequestError,
    ModelLoadingError,
    ModelNotFoundError,
    UnsupportedError,
)
from parrot_gateway.routing.model_directory import ChosenModel, Target, choose_model
from parrot_gateway.semantic.call_chain import (
    MAX_OUTPUTS,
    Form,
    OutputStep,
    objective_of,
    request_of,
    steps_of,
)
from parrot_gateway.semantic.templates.body_template import BodyTemplate
from parrot_gateway.semantic.templates.text_template import Binding

# --- templates ------------------------------------------------------------------------------------


def rendered(step: OutputStep, form: Form, values: dict[str, str]) -> Any:
    """Render the prompt that the model is sent, with the values of parameters in place."""
    inputs = {name: Binding(variable_id=f"id-{name}") for name in step.reads}
    template = BodyTemplate.of_call(request_of(step, form, {}), inputs, verbatim=True)
    assert template.variables == {f"id-{name}" for name in step.reads}
    return json.loads(template.render({f"id-{name}": values[name] for name in step.reads}))


def test_one_output() -> None:
    (step,) = steps_of("Tell {{who}} about {{what}}: {{out}} Bye.", ["who", "what"], ["out"])
    assert (step.output, step.reads) == ("out", ("who", "what"))
    values = {"who": "Bob", "what": "{{out}} and {{who}}"}
    assert rendered(step, "text", values) == {"prompt": "Tell Bob about {{out}} and {{who}}: "}
    assert step.size == len("Tell {{who}} about {{what}}: ")


def test_every_output_is_generated_from_all_before_it() -> None:
    template = (
        "Plan for {{x}}:{{plan}}\nCode:{{code}}\nAgain {{plan}}, and {{x}}:{{test}} end {{y}}"
    )
    steps = steps_of(template, ["x", "y"], ["test", "code", "plan"])
    assert [step.output for step in steps] == ["plan", "code", "test"]
    assert [step.reads for step in steps] == [("x",), ("x", "plan"), ("x", "plan", "code")]
    values = {"x": "X", "plan": "P", "code": "C"}
    assert [rendered(step, "text", values)["prompt"] for step in steps] == [
        "Plan for X:",
        "Plan for X:P\nCode:",
        "Plan for X:P\nCode:C\nAgain P, and X:",
    ]
    assert rendered(steps[2], "messages", values)["messages"] == [
        {"role": "user", "content": "Plan for X:"},
        {"role": "assistant", "content": "P"},
        {"role": "user", "content": "\nCode:"},
        {"role": "assistant", "content": "C"},
        {"role": "user", "content": "\nAgain P, and X:"},
    ]


def test_neighbouring_outputs_are_one_message() -> None:
    steps = steps_of("Go:{{a}}{{b}}{{c}}", [], ["a", "b", "c"])
    assert rendered(steps[2], "messages", {"a": "1", "b": "2"})["messages"] == [
        {"role": "user", "content": "Go:"},
        {"role": "assistant", "content": "12"},
    ]


def test_values_are_put_in_as_they_are_inside_of_json_too() -> None:
    """The model wrote `say "hi"` behind an open quote; its next output continues that."""
    steps = steps_of('[{"a": "{{a}}", "b": "{{b}}"}]', [], ["a", "b"])
    said = 'say "hi" \\'
    prompt = rendered(steps[1], "text", {"a": said})["prompt"]
    assert prompt == '[{"a": "' + said + '", "b": "'


def test_a_template_of_many_places() -> None:
    places = 300_000
    (step,) = steps_of("Say:" + "{{ x }}," * places + "{{out}}", ["x"], ["out"])
    assert step.before == ("Say:" + "{{x}}," * places,)
    assert step.reads == ("x",)


def test_undeclared_braces_are_ordinary_text() -> None:
    (step,) = steps_of("{{ user.name }} {{other}} {{in}}:{{out}}", ["in"], ["out"])
    prompt = rendered(step, "text", {"in": "1"})["prompt"]
    assert prompt == "{{ user.name }} {{other}} 1:"


def test_an_input_without_a_place_is_known_to_be_cut_away_or_misspelt() -> None:
    assert len(steps_of("x {{out}}", ["in"], ["out"])) == 1
    assert len(steps_of("x {{other}} {{in}} {{out}}", ["in"], ["out"])) == 1
    with pytest.raises(InvalidRequestError, match=r"'imput'.*'input'") as caught:
        steps_of("x {{imput}} {{out}}", ["input"], ["out"])
    assert (caught.value.param, caught.value.code) == ("template", "undeclared_placeholder")


@pytest.mark.parametrize(
    ("template", "inputs", "outputs", "param", "named"),
    [
        ("Hello", [], [], "parameters", "1 to"),
        ("Hello {{a}}", ["a"], [], "parameters", "1 to"),
        ("Hello {{a}}", ["a"], ["b"], "template", "'b'"),
        ("{{b}} Hello", [], ["b"], "template", "'b'"),
        ("x{{a-b}}", [], ["a-b"], "parameters", "'a-b'"),
        ("x{{9}}", [], ["9"], "parameters", "'9'"),
        ("x", [], [f"o{i}" for i in range(MAX_OUTPUTS + 1)], "parameters", str(MAX_OUTPUTS)),
    ],
)
def test_bad_templates_are_named(
    template: str, inputs: list[str], outputs: list[str], param: str, named: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        steps_of(template, inputs, outputs)
    assert caught.value.param == param
    assert named in caught.value.message


_TEXTS = st.text(alphabet='ab{}"\\\n {{', max_size=8).filter(lambda text: "{{" not in text)
_PARTS = st.lists(
    st.tuples(st.sampled_from(["text", "in", "out"]), _TEXTS, st.integers(0, 3)), max_size=12
)


@given(_PARTS, st.lists(st.text(max_size=6), min_size=4, max_size=4))
def test_prompts_are_the_template_with_values_in_place(
    parts: list[tuple[str, str, int]], values: list[str]
) -> None:
    template, expected, sofar = "Go|", [], "Go|"
    outputs: list[str] = []
    for kind, text, number in parts:
        if kind == "text":
            # Closed by a mark, so that no braces of a text meet those of a placeholder.
            template, sofar = f"{template}{text}|", f"{sofar}{text}|"
        elif kind == "in":
            template, sofar = f"{template}{{{{i{number}}}}}|", f"{sofar}{values[number]}|"
        else:
            name = f"o{len(outputs)}"
            expected.append(sofar)
            outputs.append(name)
            template, sofar = f"{template}{{{{{name}}}}}|", f"{sofar}<{name}>|"
    inputs = [f"i{number}" for number in range(4)]
    if not outputs:
        with pytest.raises(InvalidRequestError):
            steps_of(template, inputs, outputs)
        return
    by_name = dict(zip(inputs, values, strict=True)) | {name: f"<{name}>" for name in outputs}
    steps = steps_of(template, inputs, outputs)
    assert [rendered(step, "text", by_name)["prompt"] for step in steps] == expected
    for step, prompt in zip(steps, expected, strict=True):
        messages = rendered(step, "messages", by_name)["messages"]
        assert "".join(message["content"] for message in messages) == prompt
        roles = [message["role"] for message in messages]
        assert all(one != other for one, other in pairwise(roles))
        assert roles[0] == "user"


# --- criteria -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("criteria", "objective"),
    [
        (None, None),
        ("latency", LATENCY),
        ("throughput", THROUGHPUT),
        ("TTFT", Objective("ttft", 0.5)),
        ("TPOT", Objective("tpot", 0.05)),
        ("ttft", Objective("ttft", 0.5)),
        ("Latency", LATENCY),
        ("ttft=200ms", Objective("ttft", 0.2)),
    ],
)
def test_criteria(criteria: str | None, objective: Objective | None) -> None:
    assert objective_of(criteria, "criteria") == objective


def test_unknown_criteria_are_named() -> None:
    with pytest.raises(InvalidRequestError, match="soon") as caught:
        objective_of("soon", "output_criteria")
    assert caught.value.param == "output_criteria"


# --- bodies ---------------------------------------------------------------------------------------


def config(**changes: Any) -> SamplingConfig:
    return msgspec.convert(SAMPLING | changes, SamplingConfig)


def call(*parameters: dict[str, Any], **fields: Any) -> SemanticCallBody:
    body = {"session_id": 1, "template": "x", "parameters": list(parameters), **fields}
    return decode(json.dumps(body).encode(), msgspec.json.Decoder(SemanticCallBody))


def test_what_is_off_is_not_sent_upstream_and_said_to_own_engines() -> None:
    assert sampling_fields(config(), is_own=False) == {"temperature": 1.0, "top_p": 1.0}
    assert sampling_fields(config(), is_own=True) == {
        "temperature": 1.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
    }
    assert sampling_fields(None, is_own=False) == {"temperature": 1.0, "top_p": 1.0}
    assert (max_tokens(config()), max_tokens(None), max_tokens(config(max_gen_length=7))) == (
        512,
        512,
        7,
    )


def test_what_is_on_is_sent_under_the_ordinary_names() -> None:
    asked = config(
        temperature=0.0,
        top_p=0.5,
        ignore_tokenizer_eos=True,
        stop_token_ids=[3],
        stop_str="\n",
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"5": 2},
        repetition_penalty=1.2,
        length_penalty=1.0,
        seed=0,
    )
    assert sampling_fields(asked, is_own=False) == {
        "temperature": 0.0,
        "top_p": 0.5,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "stop": "\n",
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "logit_bias": {"5": 2},
        "repetition_penalty": 1.2,
        "seed": 0,
    }
    assert sampling_fields(config(stop_str=["a", "", "b"]), is_own=False)["stop"] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_gen_length": 0}, "max_gen_length"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"stop_str": ["a"] * 5}, "stop_str"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_token_ids": "x"}, "stop_token_ids"),
    ],
)
def test_sampling_that_cannot_be_honoured_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_call(
            call(
                {"name": "a", "value": "x"},
                {"name": "o", "is_output": True, "sampling_config": SAMPLING | changes},
            )
        )
    assert caught.value.param is not None
    assert caught.value.param.endswith(f".sampling_config.{field}")
    assert caught.value.param in caught.value.message
    if field in ("n", "best_of", "length_penalty"):
        assert isinstance(caught.value, UnsupportedError)
        assert caught.value.param == f"parameters[1].sampling_config.{field}"


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ([{"name": "a"}], "parameters[0]"),
        ([{"name": "a", "var_id": "v", "value": "x"}], "parameters[0]"),
        ([{"name": "a", "value": "x"}, {"name": "a", "value": "y"}], "parameters[1]"),
        ([{"name": "a", "is_output": True, "value": "x"}], "parameters[0].value"),
        ([{"name": "a", "value": "x", "sampling_config": {}}], "parameters[0].sampling_config"),
        ([{"name": "a", "value": 5}], "parameters[0].value"),
        ([{"value": "x"}], "parameters[0].name"),
        ([{"name": f"p{i}", "value": ""} for i in range(1025)], "parameters"),
    ],
)
def test_bad_parameters_are_named(parameters: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_call(call(*parameters))
    assert caught.value.param == param


def test_good_calls_pass_and_unknown_fields_are_ignored() -> None:
    body = call(
        {"name": "a", "is_output": False, "var_id": "v", "value": None},
        {"name": "c", "is_output": False, "value": ""},
        {"name": "b", "is_output": True, "sampling_config": SAMPLING},
        {"name": "d", "is_output": True, "var_id": "w"},
        retry_times=1,
        models=[],
        model_type="token_id",
        remove_pure_fill=True,
        cache_prefix=False,
        output_criteria=None,
        fuse_fill=True,
    )
    check_call(body)
    for field, bad in (
        ("model_type", "tokens"),
        ("models", ["m"] * 129),
        ("func_name", "f" * 257),
        ("func_name", "f\x1b[31m"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            check_call(call(**{field: bad}))
        assert caught.value.param == field


def test_session_ids_are_integers_of_any_size_or_their_digits() -> None:
    number = 2**130 + 1
    body = decode(
        b'{"session_id": %d, "template": "", "parameters": []}' % number,
        msgspec.json.Decoder(SemanticCallBody),
    )
    assert session_number(body.session_id) == session_number(str(number)) == number
    for bad in ("", "x", "1.5", "-1", "9" * 65, "¹"):
        with pytest.raises(InvalidRequestError) as caught:
            session_number(bad)
        assert caught.value.param == "session_id"
    for raw in (b"1.5", b"true", b"null", b"[]", b"1e30", b"9" * 5000):
        with pytest.raises(InvalidRequestError) as caught:
            decode(
                b'{"session_id": %s, "template": "", "parameters": []}' % raw,
                msgspec.json.Decoder(SemanticCallBody),
            )
        assert caught.value.param == "session_id"


# --- models ---------------------------------------------------------------------------------------


def choose(
    allowed: list[str],
    model_type: Any = "token_id",
    own: tuple[str, ...] = ("mine",),
    listed: tuple[str, ...] = ("theirs",),
) -> ChosenModel:
    def resolve(name: str) -> Target:
        if name in own:
            return Target(name)
        if name in listed:
            return Target(name, "up")
        if name == "late":
            raise ModelLoadingError("not yet")
        raise ModelNotFoundError("no")

    return choose_model(allowed, model_type, resolve=resolve, own=own, listed=listed)


def test_the_first_allowed_model_that_is_served() -> None:
    assert choose(["other", "theirs", "mine"]) == ("theirs", False)
    assert choose(["mine", "theirs"], "text") == ("mine", True)
    assert choose(["late", "mine"]) == ("mine", True)
    with pytest.raises(ModelLoadingError):
        choose(["other", "late"])
    with pytest.raises(ModelNotFoundError, match="'other', 'another'") as caught:
        choose(["other", "another"])
    assert caught.value.param == "models"


def test_the_default_is_of_the_kind_asked_for_if_there_is_one() -> None:
    assert choose([]) == ("mine", True)
    assert choose([], "text") == ("theirs", False)
    assert choose([], "token_id", own=()) == ("theirs", False)
    assert choose([], "text", listed=()) == ("mine", True)
    with pytest.raises(InvalidRequestError) as caught:
        choose([], own=(), listed=())
    assert caught.value.param == "models"
