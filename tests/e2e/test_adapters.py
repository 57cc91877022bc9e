"""LoRA adapters of `serve`: flags, settings, `/v1/models`, and calls that choose them by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.lora_folders import make_adapter
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess
from harness.raw_http import RawConnection, check_error
from openai import NotFoundError, OpenAI
from parrot_engine import LLM, SamplingParams
from parrot_engine.loading.hub import resolve_model

PROMPT = "Once upon a time there was a parrot who " * 4
TOKENS = 8
ADMIN_KEY = "the admin's own"


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
    make_adapter(folder / "wrong", base, r=9)
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
            "server": {"admin_key": "env:THE_ADMIN_KEY"},
        },
        api_key=API_KEY,
        environment={"THE_ADMIN_KEY": ADMIN_KEY},
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


def admin(served: Served, what: str, key: str = ADMIN_KEY, **body: Any) -> Any:
    with RawConnection(served.gateway.port, api_key=key) as connection:
        return connection.ask("POST", f"/v1/{what}_lora_adapter", body)


def test_adapters_come_and_go_while_calls_run(served: Served) -> None:
    path = str(served.folder / "two")
    loaded = admin(served, "load", lora_name="late", lora_path=path)
    assert (loaded.status, loaded.body) == (
        200, b"Success: LoRA adapter 'late' added successfully."
    )  # fmt: skip
    again = admin(served, "load", lora_name="late", lora_path=path)
    check_error(again, 400)
    assert again.json["error"]["message"].startswith(
        "The lora adapter 'late' has already been loaded."
    )
    with client_of(served) as client:
        answer = ask(client, "late")
        assert answer.choices[0].text == served.expected["two"]
        assert answer.usage.prompt_tokens_details.cached_tokens > 0
        stream = client.completions.create(
            model="late", prompt=PROMPT, max_tokens=64, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        first = next(iter(stream))
        removed = admin(served, "unload", lora_name="late")
        assert removed.body == b"Success: LoRA adapter 'late' removed successfully."
        text = first.choices[0].text + "".join(chunk.choices[0].text for chunk in stream)
        assert text.startswith(served.expected["two"])
        with pytest.raises(NotFoundError):
            ask(client, "late")
        assert "late" not in [model.id for model in client.models.list()]
    gone = admin(served, "unload", lora_name="late")
    check_error(gone, 404)
    assert gone.json["error"]["message"] == "The lora adapter 'late' cannot be found."


def test_another_adapter_in_place(served: Served) -> None:
    with client_of(served) as client:
        for name in ("one", "two", "one"):
            path = str(served.folder / name)
            answer = admin(served, "load", lora_name="x", lora_path=path, load_inplace=True)
            assert answer.status == 200, answer.body
            assert ask(client, "x").choices[0].text == served.expected[name]
    assert admin(served, "unload", lora_name="x").status == 200


@pytest.mark.parametrize(
    ("body", "param", "problem"),
    [
        ({}, "lora_name", "must be provided"),
        ({"lora_name": "a"}, "lora_path", "must be provided"),
        ({"lora_name": 3, "lora_path": "p"}, "lora_name", "Invalid type"),
        ({"lora_name": "a\n", "lora_path": "p"}, "lora_name", "no control characters"),
        ({"lora_name": "a", "lora_path": "p\u0000"}, "lora_path", "control characters"),
        ({"lora_name": DEMO_MODEL, "lora_path": "p"}, "lora_name", "is the name of a model"),
        ({"lora_name": "a", "lora_path": "/etc"}, "lora_path", "in none of the folders"),
        ({"lora_name": "a", "lora_path": "FOLDER/../.."}, "lora_path", "in none of the folders"),
        ({"lora_name": "a", "lora_path": "FOLDER/nothing"}, "lora_path", "is no folder"),
        ({"lora_name": "a", "lora_path": "FOLDER/wrong"}, "lora_path", "a rank of 9 ask for"),
        ({"lora_name": "a", "lora_path": "p", "base_model": "b"}, "base_model", "takes no adapter"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    served: Served, body: dict[str, Any], param: str, problem: str
) -> None:
    if isinstance(body.get("lora_path"), str):
        body = {**body, "lora_path": body["lora_path"].replace("FOLDER", str(served.folder))}
    answer = admin(served, "load", **body)
    check_error(answer, 400)
    assert answer.json["error"]["param"] == param
    assert problem in answer.json["error"]["message"]


def test_only_the_admin_may(served: Served) -> None:
    body = {"lora_name": "mine", "lora_path": str(served.folder / "one")}
    for what in ("load", "unload"):
        check_error(admin(served, what, API_KEY, **body), 401)
    with RawConnection(served.gateway.port, api_key=ADMIN_KEY) as connection:
        more = {"model": DEMO_MODEL, "adapters": {"x": "/etc"}}
        check_error(connection.ask("POST", "/admin/v1/models/load", more), 403)
