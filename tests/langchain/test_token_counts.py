"""Token counts come from the gateway, which has the model's tokenizer; nothing else is loaded."""

from __future__ import annotations

import pickle
import sys

import langchain_parrot
import pytest
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess, closed_port
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    trim_messages,
)
from langchain_parrot import ChatParrot, ParrotLLM
from langchain_parrot.exceptions import ParrotError

HISTORY: list[BaseMessage] = [
    SystemMessage("You tell tales."),
    HumanMessage("Tell me of a ship. " * 20),
    AIMessage("There was a ship. " * 20),
    HumanMessage("And then?"),
]


def chat(demo: GatewayProcess) -> ChatParrot:
    return ChatParrot(model=DEMO_MODEL, base_url=demo.base_url, api_key=API_KEY, max_tokens=1)


def test_messages_are_trimmed_to_what_the_gateway_counts(
    demo: GatewayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = chat(demo)
    counted = model.get_num_tokens_from_messages(HISTORY)
    usage = model.invoke(HISTORY).usage_metadata
    assert usage is not None
    assert counted == usage["input_tokens"]
    trimmed = trim_messages(
        HISTORY,
        token_counter=model,
        max_tokens=counted - 1,
        strategy="last",
        start_on="human",
        include_system=True,
    )
    assert trimmed == [HISTORY[0], HISTORY[3]]
    assert model.get_num_tokens_from_messages([]) == 0


@pytest.mark.parametrize("kind", [ChatParrot, ParrotLLM])
def test_texts_are_counted(demo: GatewayProcess, kind: type[ChatParrot] | type[ParrotLLM]) -> None:
    model = kind(model=DEMO_MODEL, base_url=demo.base_url, api_key=API_KEY)
    ids = model.get_token_ids("Once upon a time")
    assert len(ids) == model.get_num_tokens("Once upon a time") > 1
    assert model.get_token_ids("") == []
    assert pickle.loads(pickle.dumps(model)).get_num_tokens("Once upon a time") == len(ids)


def test_counting_again_needs_no_gateway() -> None:
    config = {"models": [{"model": DEMO_MODEL}]}
    with GatewayProcess(config=config) as gateway:
        model = ChatParrot(model=DEMO_MODEL, base_url=gateway.base_url, max_retries=0)
        counted = model.get_num_tokens_from_messages(HISTORY)
    assert model.get_num_tokens_from_messages(HISTORY) == counted
    with pytest.raises(langchain_parrot.ParrotConnectionError, match="parrot-gateway serve"):
        model.get_num_tokens("new")


def test_the_users_own_tokenizer_wins() -> None:
    nowhere = f"http://127.0.0.1:{closed_port()}/v1"
    model = ChatParrot(model="m", base_url=nowhere, custom_get_token_ids=lambda text: [1] * 7)
    assert model.get_num_tokens("x") == 7
    assert model.get_token_ids("x") == [1] * 7
    assert model.get_num_tokens_from_messages([HumanMessage("x")]) == 7


def test_models_of_upstreams_have_no_tokenizer_here(gateway: GatewayProcess) -> None:
    model = ChatParrot(model="any", base_url=gateway.base_url, api_key=API_KEY)
    with pytest.raises(ParrotError, match="tokenizer"):
        model.get_num_tokens_from_messages(HISTORY)
