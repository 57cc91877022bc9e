"""ChatParrot on a gateway with the scripted model behind it: what it sends and what it answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypedDict

import pytest
from harness.processes import GatewayProcess
from harness.scripted_model import MODEL, OTHER_MODEL, THINKING_MODEL, ScriptedModel
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.load import dumps, loads
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolMessage,
)
from langchain_core.outputs import ChatGeneration
from langchain_core.runnables import ConfigurableField, RunnableBinding
from langchain_parrot import ChatParrot
from langchain_parrot._messages import to_message
from pydantic import BaseModel, SecretStr


def chat(gateway: GatewayProcess, **arguments: Any) -> ChatParrot:
    connection = {"base_url": gateway.base_url, "api_key": gateway.api_key}
    return ChatParrot(**{"model": MODEL, **connection, **arguments})


def collected(chunks: list[Any]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert isinstance(whole, AIMessageChunk)
    return whole


class Weather(BaseModel):
    """The weather of a place."""

    place: str
    degrees: int


class WeatherDict(TypedDict):
    """The weather of a place."""

    place: str
    degrees: int


def weather(place: str) -> str:
    """Tell the weather of a place."""
    return f"rain in {place}"


# -- answers ----------------------------------------------------------------------------------


def test_an_answer_tells_tokens_model_and_what_the_gateway_said(gateway: GatewayProcess) -> None:
    answer = chat(gateway, session="s-1").invoke("hello there", output="greeting")
    assert answer.content == "You said: hello there"
    assert answer.usage_metadata == {
        "input_tokens": 2,
        "output_tokens": 4,
        "total_tokens": 6,
        "input_token_details": {"cache_read": 1},
        "output_token_details": {"reasoning": 1},
    }
    told = answer.response_metadata
    assert (told["model_name"], told["finish_reason"]) == (MODEL, "stop")
    assert told["system_fingerprint"] == "fp_scripted"
    parrot = told["parrot"]
    assert parrot.keys() == {"session", "call", "variable", "engine", "cached_tokens", "queue_ms"}
    assert parrot["engine"] == "behind"
    assert parrot["cached_tokens"] == 1
    assert isinstance(parrot["queue_ms"], float)
    variable = gateway.get(f"/v1/variables/{parrot['variable']}")
    assert (variable["name"], variable["value"]) == ("greeting", "You said: hello there")


def test_a_stream_tells_the_same_once_and_at_its_end(gateway: GatewayProcess) -> None:
    chunks = list(chat(gateway, session="s-2").stream("hello there"))
    assert [chunk.content for chunk in chunks] == ["", "You", " said:", " hello", " there", "", ""]
    assert [chunk.chunk_position for chunk in chunks] == [None] * 6 + ["last"]
    assert [chunk.usage_metadata is not None for chunk in chunks] == [False] * 6 + [True]
    whole = collected(chunks)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["input_token_details"] == {"cache_read": 1}
    told = whole.response_metadata
    assert (told["model_name"], told["finish_reason"]) == (MODEL, "stop")
    assert told["parrot"]["engine"] == "behind"


def test_a_stream_without_usage_asks_for_none(
    gateway: GatewayProcess, scripted: ScriptedModel
) -> None:
    whole = collected(list(chat(gateway, stream_usage=False).stream("hello")))
    assert whole.usage_metadata is None
    assert "stream_options" not in scripted.bodies[-1]
    own = {"include_usage": False}
    collected(list(chat(gateway, model_kwargs={"stream_options": own}).stream("hello")))
    assert scripted.bodies[-1]["stream_options"] == own


def test_what_the_model_thought_is_beside_its_answer(gateway: GatewayProcess) -> None:
    model = chat(gateway, model=THINKING_MODEL)
    for answer in (model.invoke("hm"), collected(list(model.stream("hm")))):
        assert answer.content == "You said: hm"
        assert answer.additional_kwargs["reasoning_content"] == "Let me see."
        kinds = [block["type"] for block in answer.content_blocks]
        assert kinds == ["reasoning", "text"]


def test_streaming_inside_gives_the_same_answer(gateway: GatewayProcess) -> None:
    plain, inside = chat(gateway).invoke("hello"), chat(gateway, streaming=True).invoke("hello")
    assert (inside.content, inside.usage_metadata) == (plain.content, plain.usage_metadata)


def test_callbacks_count_tokens_and_see_the_pieces(gateway: GatewayProcess) -> None:
    counter = UsageMetadataCallbackHandler()
    model = chat(gateway)
    model.invoke("one two", config={"callbacks": [counter]})
    list(model.stream("one two three", config={"callbacks": [counter]}))
    assert counter.usage_metadata[MODEL]["input_tokens"] == 5


def test_several_candidates_are_generations_and_their_tokens_count_once() -> None:
    document = {
        "model": "m",
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
        "choices": [
            {"index": n, "message": {"content": text}, "finish_reason": "stop"}
            for n, text in enumerate("ab")
        ],
    }
    model = ChatParrot(model="m", n=2)
    result = model._read(model._options(None, None, {}), [], json.dumps(document).encode(), {})
    messages: list[Any] = [generation.message for generation in result.generations]
    assert [message.content for message in messages] == ["a", "b"]
    assert messages[0].usage_metadata["total_tokens"] == 3
    assert messages[1].usage_metadata is None


def test_every_event_loop_has_connections_of_its_own(gateway: GatewayProcess) -> None:
    model = chat(gateway)

    async def ask() -> Any:
        streamed = [chunk async for chunk in model.astream("a b")]
        return (await model.ainvoke("a b")).content, collected(streamed).content

    for _ in range(3):
        assert asyncio.run(ask()) == ("You said: a b",) * 2


# -- what is sent -----------------------------------------------------------------------------


def test_parameters_of_constructor_and_call_reach_the_model(
    gateway: GatewayProcess, scripted: ScriptedModel
) -> None:
    model = chat(gateway, temperature=0.5, max_tokens=9, model_kwargs={"top_k": 3}, stop=["x"])
    model.invoke("hello", temperature=0, min_p=0.1, stop=["y"], extra_body={"dry": 1})
    body = scripted.bodies[-1]
    sent = {name: body[name] for name in ("temperature", "max_tokens", "top_k", "min_p", "dry")}
    assert sent == {"temperature": 0, "max_tokens": 9, "top_k": 3, "min_p": 0.1, "dry": 1}
    assert body["stop"] == ["y"]
    model.invoke("hello", model=OTHER_MODEL)
    assert (scripted.bodies[-1]["model"], scripted.bodies[-1]["stop"]) == (OTHER_MODEL, ["x"])


def test_parrots_fields_are_the_calls_before_the_constructors(gateway: GatewayProcess) -> None:
    model = chat(gateway, session="s-3", name="drafts", priority=1, linking=False)
    call = model._options(None, None, {"priority": 2, "inputs": {"a": "b"}, "transform": "strip"})
    assert call.parrot == {
        "session": "s-3",
        "name": "drafts",
        "priority": 2,
        "inputs": {"a": "b"},
        "transform": "strip",
    }
    assert call.body == {"parrot": call.parrot}


def test_a_call_reads_what_another_one_wrote(
    gateway: GatewayProcess, scripted: ScriptedModel
) -> None:
    model = chat(gateway, session="s-4")
    model.invoke("the sea", output="theme", transform="upper")
    answer = model.bind(inputs={"what": "theme"}).invoke("A poem of {{ what }}")
    assert answer.content == "You said: A poem of YOU SAID: THE SEA"
    assert "parrot" not in scripted.bodies[-1]


def test_messages_of_every_kind_reach_the_model(
    gateway: GatewayProcess, scripted: ScriptedModel
) -> None:
    picture = {"type": "image", "base64": "aGk=", "mime_type": "image/png"}
    chat(gateway).invoke(
        [
            SystemMessage("be brief"),
            HumanMessage([{"type": "text", "text": "look"}, picture], name="ann"),
            AIMessage(
                [
                    {"type": "reasoning", "reasoning": "hm"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_call", "name": "weather", "args": {"place": "x"}, "id": "1"},
                ],
                tool_calls=[{"name": "weather", "args": {"place": "å"}, "id": "1"}],
                invalid_tool_calls=[
                    InvalidToolCall(
                        type="invalid_tool_call", name="zoom", args="{", id="2", error="no JSON"
                    )
                ],
            ),
            ToolMessage("rain", tool_call_id="1", name="weather"),
            ToolMessage("what?", tool_call_id="2", status="error"),
        ]
    )
    sent = scripted.bodies[-1]["messages"]
    url = {"url": "data:image/png;base64,aGk="}
    assert sent[0] == {"role": "system", "content": "be brief"}
    assert sent[1]["content"][1] == {"type": "image_url", "image_url": url}
    assert sent[1]["name"] == "ann"
    assert sent[2]["content"] == "I look."
    calls = [(call["id"], call["function"]) for call in sent[2]["tool_calls"]]
    assert calls == [
        ("1", {"name": "weather", "arguments": '{"place": "å"}'}),
        ("2", {"name": "zoom", "arguments": "{"}),
    ]
    assert sent[3] == {"role": "tool", "tool_call_id": "1", "content": "rain"}
    assert sent[4] == {"role": "tool", "tool_call_id": "2", "content": "what?"}


# -- tools and structured output --------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("auto", "auto"),
        ("none", "none"),
        (False, "none"),
        ("required", "required"),
        ("any", "required"),
        (True, "required"),
        ("weather", {"type": "function", "function": {"name": "weather"}}),
        (
            {"type": "function", "function": {"name": "weather"}},
            {"type": "function", "function": {"name": "weather"}},
        ),
        (None, None),
    ],
)
def test_tool_choice_has_many_forms(given: Any, sent: Any) -> None:
    bound = ChatParrot(model="m").bind_tools([weather, Weather], tool_choice=given)
    assert isinstance(bound, RunnableBinding)
    assert bound.kwargs.get("tool_choice") == sent


@pytest.mark.parametrize("choice", ["rain", {"type": "function", "function": {"name": "rain"}}])
def test_a_tool_that_is_not_bound_cannot_be_chosen(choice: Any) -> None:
    with pytest.raises(ValueError, match=r"'rain' is none of the bound tools \(weather\)"):
        ChatParrot(model="m").bind_tools([weather], tool_choice=choice)


def test_strict_tools_and_single_calls_are_said_so() -> None:
    bound = ChatParrot(model="m").bind_tools([weather], strict=True, parallel_tool_calls=False)
    assert isinstance(bound, RunnableBinding)
    assert bound.kwargs["parallel_tool_calls"] is False
    assert bound.kwargs["tools"][0]["function"]["strict"] is True


def test_arguments_that_are_no_object_are_an_invalid_call() -> None:
    def called(arguments: str) -> AIMessage:
        function = {"name": "weather", "arguments": arguments}
        call = {"id": "1", "type": "function", "function": function}
        return to_message({"content": None, "tool_calls": [call]}, None)

    assert called('{"place": "x"}').tool_calls[0]["args"] == {"place": "x"}
    assert called("").tool_calls[0]["args"] == {}
    for arguments in ('{"place"', "[1]"):
        assert called(arguments).tool_calls == []
        assert called(arguments).invalid_tool_calls[0]["args"] == arguments


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("schema", [Weather, WeatherDict, Weather.model_json_schema()])
def test_structured_output_by_every_method(
    gateway: GatewayProcess, method: Any, schema: Any
) -> None:
    # In JSON mode the scripted model writes the keys that the question names.
    question = "Weather as 'place' in JSON" if method == "json_mode" else "of 'Oslo', 12 degrees"
    raw = chat(gateway).with_structured_output(schema, method=method, include_raw=True)
    answer = raw.invoke(question)
    assert isinstance(answer["raw"], AIMessage)
    if method == "json_mode" and schema is Weather:
        # One of two keys: the parser says so, and nothing is raised.
        assert answer["parsed"] is None
        assert "degrees" in str(answer["parsing_error"])
        return
    expected = {"place": "cats"} if method == "json_mode" else {"place": "Oslo", "degrees": 12}
    parsed = answer["parsed"]
    assert answer["parsing_error"] is None
    assert (parsed.model_dump() if schema is Weather else parsed) == expected
    structured = chat(gateway).with_structured_output(schema, method=method)
    assert structured.invoke(question) == parsed
    assert list(structured.stream(question))[-1] == parsed


def test_structured_output_names_schema_and_strictness(
    gateway: GatewayProcess, scripted: ScriptedModel
) -> None:
    chat(gateway).with_structured_output(Weather, strict=True).invoke("of 'Oslo', 12 degrees")
    wanted = scripted.bodies[-1]["response_format"]["json_schema"]
    assert (wanted["name"], wanted["strict"]) == ("Weather", True)
    assert wanted["description"] == "The weather of a place."
    assert wanted["schema"]["additionalProperties"] is False


def test_structured_output_wants_a_schema_and_a_known_method() -> None:
    with pytest.raises(ValueError, match="needs a schema"):
        ChatParrot(model="m").with_structured_output()
    with pytest.raises(ValueError, match="json_schema, function_calling or json_mode"):
        ChatParrot(model="m").with_structured_output(Weather, method="xml")  # type: ignore[arg-type]


# -- LangChain's conventions ------------------------------------------------------------------


def test_address_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PARROT_BASE_URL", "OPENAI_API_BASE", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PARROT_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert ChatParrot(model="m").base_url == "http://127.0.0.1:8000/v1"
    assert ChatParrot(model="m").api_key is None
    for place, variable in enumerate(("OPENAI_BASE_URL", "OPENAI_API_BASE", "PARROT_BASE_URL")):
        monkeypatch.setenv(variable, f"http://host-{place}/v1/")
        assert ChatParrot(model="m").base_url == f"http://host-{place}/v1"
    for variable in ("OPENAI_API_KEY", "PARROT_API_KEY"):
        monkeypatch.setenv(variable, variable.lower())
        assert ChatParrot(model="m").api_key == SecretStr(variable.lower())
    assert ChatParrot(model="m", base_url="https://given/v1").base_url == "https://given/v1"


def test_arguments_by_the_names_that_chat_openai_has() -> None:
    model = ChatParrot(  # type: ignore[call-arg]
        model_name="m", openai_api_base="http://h/v1", openai_api_key="k", request_timeout=5
    )
    assert (model.model, model.model_name, model.base_url) == ("m", "m", "http://h/v1")
    assert (model.api_key, model.timeout) == (SecretStr("k"), 5)


def test_unknown_arguments_are_sent_along_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="'top_k' not known to ChatParrot"):
        model = ChatParrot(model="m", top_k=4)  # type: ignore[call-arg]
    assert model.model_kwargs == {"top_k": 4}
    with pytest.raises(ValueError, match="'temperature' is an argument of its own"):
        ChatParrot(model="m", model_kwargs={"temperature": 1})
    with pytest.raises(ValueError, match="http://"):
        ChatParrot(model="m", base_url="localhost:8000")


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
def test_a_model_is_written_and_read_without_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ChatParrot(model="m", api_key=SecretStr("hush"), transform="strip", temperature=0)
    written = dumps(model)
    assert "hush" not in written
    assert "hush" not in repr(model)
    monkeypatch.setenv("PARROT_API_KEY", "hush")
    read = loads(
        written,
        allowed_objects=[ChatParrot],
        valid_namespaces=["langchain_parrot"],
        secrets_from_env=True,
    )
    assert read == model


def test_a_model_reconfigured_or_copied_goes_where_it_says(gateway: GatewayProcess) -> None:
    model = chat(gateway, base_url="http://127.0.0.1:9/v1")
    assert model._clients.sync() is model._clients.sync()
    copied = model.model_copy(update={"base_url": gateway.base_url})
    assert copied.invoke("hello").content == "You said: hello"
    configurable = model.configurable_fields(base_url=ConfigurableField(id="where"))
    answer = configurable.invoke("hello", config={"configurable": {"where": gateway.base_url}})
    assert answer.content == "You said: hello"


def test_traces_see_model_and_limits_but_no_key() -> None:
    model = ChatParrot(model="m", api_key=SecretStr("hush"), max_tokens=5, stop="x", session="s")
    assert model._get_ls_params() == {
        "ls_provider": "parrot",
        "ls_model_name": "m",
        "ls_model_type": "chat",
        "ls_max_tokens": 5,
        "ls_stop": ["x"],
    }
    told = model._get_invocation_params()
    assert told["_type"] == "chat-parrot"
    assert (told["max_tokens"], told["parrot"]) == (5, {"session": "s"})
    assert "hush" not in str(told)


def test_tokens_of_a_batch_add_up(gateway: GatewayProcess) -> None:
    result = chat(gateway).generate([[HumanMessage("a b")], [HumanMessage("a b c")]])
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["prompt_tokens"] == 5
    assert result.llm_output["token_usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert all(isinstance(each[0], ChatGeneration) for each in result.generations)
