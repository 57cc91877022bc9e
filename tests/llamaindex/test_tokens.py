"""Tokens are counted by the gateway wherever LlamaIndex takes a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess, closed_port
from llama_index.core import Settings
from llama_index.core import utils as llama_index_utils
from llama_index.core.callbacks import TokenCountingHandler
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.memory import Memory
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.parrot import Parrot

TEXT = "The fisherman's \u00fcbermensch caught 12,345 fishes. " * 40


@pytest.fixture
def own_tokenizer() -> Iterator[None]:
    """Gives LlamaIndex its tokenizer back afterwards."""
    before = llama_index_utils.get_tokenizer()
    yield
    Settings.tokenizer = before


def model(demo: GatewayProcess, **fields: Any) -> Parrot:
    return Parrot(**{"model": DEMO_MODEL, "base_url": demo.base_url, "api_key": API_KEY, **fields})


def counted(demo: GatewayProcess, text: str) -> int:
    client = openai.OpenAI(base_url=demo.base_url, api_key=API_KEY)
    body = {"model": DEMO_MODEL, "prompt": text, "add_special_tokens": False}
    answer: Any = client.post(f"{demo.root}/tokenize", body=body, cast_to=object)
    return int(answer["count"])


def test_it_counts_as_the_model_does(demo: GatewayProcess) -> None:
    count = model(demo).tokenizer()
    usual = llama_index_utils.get_tokenizer()
    assert len(count(TEXT)) == counted(demo, TEXT) != len(usual(TEXT))
    assert count("") == []


def test_the_window_is_the_models(demo: GatewayProcess, own_tokenizer: None) -> None:
    llm = model(demo, max_tokens=8)
    before = llm.metadata.context_window
    Settings.tokenizer = llm.tokenizer()
    assert before < llm.metadata.context_window < 2048
    helper = PromptHelper.from_llm_metadata(llm.metadata, tokenizer=llm.tokenizer())
    packed = helper.repack(PromptTemplate("{context_str}"), [TEXT] * 8, llm=llm)
    longest = max(packed, key=len)
    assert counted(demo, longest) > 1_500
    assert llm.complete(longest).text


def test_splitters_memories_and_handlers_take_it(demo: GatewayProcess) -> None:
    count = model(demo).tokenizer()
    splitter = SentenceSplitter(tokenizer=count, chunk_size=100, chunk_overlap=0)
    sizes = [counted(demo, chunk) for chunk in splitter.split_text(TEXT)]
    assert 50 < max(sizes) <= 100
    said = [ChatMessage(role="user" if n % 2 == 0 else "assistant", content=TEXT) for n in range(4)]
    one = counted(demo, TEXT)
    for room, kept in ((5 * one, 4), (3 * one, 2)):
        memory = Memory.from_defaults(
            tokenizer_fn=count, token_limit=room, chat_history_token_ratio=1.0
        )
        memory.put_messages(said)
        assert len(memory.get()) == kept
    handler = TokenCountingHandler(tokenizer=count)
    Settings.callback_manager.add_handler(handler)
    try:
        MockLLM(callback_manager=Settings.callback_manager).complete(TEXT)
    finally:
        Settings.callback_manager.remove_handler(handler)
    assert handler.prompt_llm_token_count == one


def test_a_gateway_that_is_gone(demo: GatewayProcess) -> None:
    llm = model(demo)
    count = llm.tokenizer()
    llm.base_url = f"http://127.0.0.1:{closed_port()}/v1"
    llm.max_retries = 0
    assert len(count("Still there.")) > 1
    with pytest.raises(openai.APIConnectionError, match="parrot-gateway serve"):
        llm.tokenizer()
