"""ParrotLLM on a gateway with the scripted model behind it."""

from __future__ import annotations

from typing import Any

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess
from harness.scripted_model import MODEL, ScriptedModel
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumps, loads
from langchain_core.prompts import PromptTemplate
from langchain_parrot import ParrotLLM


def text_model(gateway: GatewayProcess, **arguments: Any) -> ParrotLLM:
    connection = {"base_url": gateway.base_url, "api_key": gateway.api_key}
    return ParrotLLM(**{"model": MODEL, **connection, **arguments})


def test_one_prompt_is_sent_as_a_string(gateway: GatewayProcess, scripted: ScriptedModel) -> None:
    assert text_model(gateway).invoke("at sea") == " after sea (0)"
    body = scripted.bodies[-1]
    assert (body["prompt"], body["max_tokens"]) == ("at sea", 256)
    text_model(gateway, max_tokens=None).invoke("at sea")
    assert "max_tokens" not in scripted.bodies[-1]


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_a_batch_is_one_call(
    gateway: GatewayProcess, scripted: ScriptedModel, how: str
) -> None:
    calls = len(scripted.bodies)
    chain = PromptTemplate.from_template("tell of the {thing}") | text_model(gateway)
    things = [{"thing": name} for name in ("sea", "sky", "sun")]
    texts = chain.batch(things) if how == "sync" else await chain.abatch(things)
    assert texts == [" after sea (0)", " after sky (0)", " after sun (0)"]
    assert len(scripted.bodies) == calls + 1
    assert len(scripted.bodies[-1]["prompt"]) == 3


def test_candidates_go_to_their_prompts(gateway: GatewayProcess) -> None:
    result = text_model(gateway, n=2).generate(["a", "b"])
    texts = [[generation.text for generation in each] for each in result.generations]
    assert texts == [[" after a (0)", " after a (1)"], [" after b (0)", " after b (1)"]]
    assert result.llm_output is not None
    assert result.llm_output["model_name"] == MODEL
    assert result.llm_output["token_usage"]["prompt_tokens"] == 2
    assert result.generations[0][0].generation_info == {"finish_reason": "stop", "logprobs": None}


def test_a_batch_on_the_demo_model_is_one_call_too(demo: GatewayProcess) -> None:
    model = text_model(demo, model=DEMO_MODEL, max_tokens=8, temperature=0)
    prompts = ["Once upon a time", "The sea was"]
    result = model.generate(prompts)
    assert [each[0].text for each in result.generations] == [model.invoke(p) for p in prompts]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["completion_tokens"] == 16


class Ends(BaseCallbackHandler):
    """Keeps what LangChain is told at the end, and every piece."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.pieces: list[str] = []

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.pieces.append(token)

    def on_llm_end(self, response: Any, **_: Any) -> None:
        self.results.append(response)


def test_a_stream_comes_in_pieces_and_tells_its_tokens(gateway: GatewayProcess) -> None:
    ends = Ends()
    pieces = list(text_model(gateway).stream("at sea", config={"callbacks": [ends]}))
    assert pieces == [" after", " sea", " (0)", "", ""]
    assert ends.pieces == pieces[:-1]
    told = ends.results[0].generations[0][0].generation_info
    assert told["token_usage"]["prompt_tokens"] == 2
    assert (told["model_name"], told["finish_reason"]) == (MODEL, "stop")


async def test_an_asynchronous_stream(gateway: GatewayProcess) -> None:
    pieces = [piece async for piece in text_model(gateway).astream("at sea", stop=[" ("])]
    assert "".join(pieces) == " after sea"


async def test_streaming_inside_gives_the_same_answer(
    gateway: GatewayProcess, scripted: ScriptedModel
) -> None:
    model = text_model(gateway, streaming=True)
    result = model.generate(["at sea"])
    assert scripted.bodies[-1]["stream"] is True
    assert result.generations[0][0].text == " after sea (0)"
    assert result.generations[0][0].generation_info == {"finish_reason": "stop", "logprobs": None}
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["prompt_tokens"] == 2
    assert await model.ainvoke("at sea") == " after sea (0)"
    assert scripted.bodies[-1]["stream"] is True


def test_variables_flow_between_text_calls(
    gateway: GatewayProcess, scripted: ScriptedModel
) -> None:
    model = text_model(gateway, session="texts")
    model.invoke("the sea", output="theme", transform="strip")
    model.invoke("A poem of {{what}}.", inputs={"what": "theme"})
    assert scripted.bodies[-1]["prompt"] == "A poem of after sea (0)."


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
def test_a_text_model_is_written_and_read() -> None:
    model = ParrotLLM(model="m", best_of=2, session="s")
    read = loads(dumps(model), allowed_objects=[ParrotLLM], valid_namespaces=["langchain_parrot"])
    assert read == model
    assert model._get_ls_params()["ls_provider"] == "parrot"
    assert model.asdict()["_type"] == "parrot"
