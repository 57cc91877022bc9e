"""LoRA adapters of `serve`: flags, settings, `/v1/models`, and calls that choose them by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.lora_folders import make_adapter
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess
from openai import OpenAI
from parrot_engine import LLM, SamplingParams
from parrot_engine.loading.hub import resolve_model

PROMPT = "Once upon a time there was a parrot who " * 4
TOKENS = 8


class Served(NamedTuple):
    gateway: GatewayProcess
    folder: Path
    #: Answers to `PROMPT` by model name.
    expected: dict[str, str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, base = tmp_path_factory.mktemp("adapters"), resolve_model(DEMO_MODEL)
    paths = {name: str(make_adapter(folder / name, base, seed=seed))
             for seed, name in enumerate(("one", "two"))}  # fmt: skip
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    names: list[str | None] = [None, *paths]
    with LLM(num_blocks=128, adapters=paths, device="cpu") as llm:
        outputs = llm.generate([PROMPT] * 3, params, adapter=names)
    expected = {name or DEMO_MODEL: output.outputs[0].text
                for name, output in zip(names, outputs, strict=True)}  # fmt: skip
    assert len(set(expected.values())) == 3
    with GatewayProcess(
        "--lora", f"two={paths['two']}",
        config={
            "models": [{"model": DEMO_MODEL, "num_blocks": 512, "adapters": {"one": paths["one"]},
                        "adapter_folders": [str(folder)], "max_loras": 2}],
        },
        api_key=API_KEY,
    ) as gateway:  # fmt: skip
        yield Served(gateway, folder, expected)


def client_of(served: Served) -> OpenAI:
    return OpenAI(base_url=served.gateway.base_url, api_key=API_KEY, max_retries=0)


def ask(client: OpenAI, model: str) -> Any:
    return client.completions.create(
        model=model, prompt=PROMPT, max_tokens=TOKENS, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


def test_models_name_their_parents(served: Served) -> None:
    with client_of(served) as client:
        models = {model.id: model.model_dump() for model in client.models.list()}
        assert client.models.retrieve("one").model_dump() == models["one"]
    assert models[DEMO_MODEL]["parent"] is None
    for name in ("one", "two"):
        assert models[name]["parent"] == DEMO_MODEL
        assert models[name]["root"] == str(served.folder / name)
        assert models[name]["max_model_len"] == models[DEMO_MODEL]["max_model_len"]


def test_the_model_name_chooses_the_adapter(served: Served) -> None:
    with client_of(served) as client:
        for _ in range(2):
            for name, text in served.expected.items():
                answer = ask(client, name)
                assert (answer.model, answer.choices[0].text) == (name, text)
                cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached > 0
        chat = client.chat.completions.create(
            model="one", messages=[{"role": "user", "content": "Hello."}], max_tokens=3
        )
        assert chat.model == "one"


def test_prefixes_are_those_of_one_adapter(served: Served) -> None:
    prompt = "Far away in the mountains there lived a dragon who " * 4
    with client_of(served) as client:
        for name in served.expected:
            found = [
                client.completions.create(model=name, prompt=prompt, max_tokens=1) for _ in range(2)
            ]
            first, again = (each.usage.prompt_tokens_details.cached_tokens for each in found)
            assert first == 0
            assert again > 0
