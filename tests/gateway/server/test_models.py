"""`/v1/models`: what is listed, and when."""

from __future__ import annotations

import asyncio

from harness.gateway.scripted_worker import EMPTY_TOKENIZER, scripted_info
from parrot_engine.link.wire import Register
from parrot_engine.text import TextAssets
from starlette.testclient import TestClient

from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.server.app import create_app
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.model import EngineLinkSettings, ModelSettings, Settings


def test_configured_models_are_listed_while_their_engines_are_away() -> None:
    # Without its lifespan: no engine is ever started, and calls wait for one a moment only.
    engines = EngineLinkSettings(restart_wait_s=0.05)
    models = [ModelSettings(model="some/model", name="mine")]
    gateway = Gateway(Settings(models=models, engines=engines))
    client = TestClient(create_app(gateway))

    def listed() -> list[str]:
        return [item["id"] for item in client.get("/v1/models").json()["data"]]

    assert listed() == ["mine"]
    found = client.get("/v1/models/mine")
    assert found.status_code == 200
    model = found.json()
    (permission,) = model.pop("permission")
    assert model == {
        "id": "mine",
        "object": "model",
        "created": int(gateway.started_at),
        "owned_by": "parrot-gateway",
        "root": "mine",
        "parent": None,
    }
    assert permission["object"] == "model_permission"
    assert permission["allow_sampling"] is True
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()
    assert client.get("/health/readiness").status_code == 503
    body = {"model": "mine", "prompt": "x"}
    answer = client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")

    # Its engine joins, and another one from outside.
    async def join() -> list[RemoteEngine]:
        return [
            gateway.registry.add(Register(name, scripted_info(name), TextAssets(EMPTY_TOKENIZER)))
            for name in ("mine", "other")
        ]

    joined = asyncio.run(join())
    assert listed() == ["mine", "other"]
    model = client.get("/v1/models/mine").json()
    assert model["created"] == int(gateway.started_at)
    assert model["max_model_len"] == joined[0].info.max_context_tokens
    assert client.get("/health/readiness").status_code == 200
    for engine in joined:
        gateway.registry.remove(engine.id, "gone")
    assert listed() == ["mine"]
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/health/readiness").status_code == 503


def test_the_root_of_an_alias_is_its_model() -> None:
    settings = Settings(models=[ModelSettings(model="some/model")], aliases={"gpt": "some/model"})
    client = TestClient(create_app(Gateway(settings)))
    assert client.get("/v1/models/gpt").json()["root"] == "some/model"
    assert client.get("/v1/models/some/model").json()["root"] == "some/model"
