"""Routes of the operator: the key that they are behind, and bodies that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from parrot_gateway.server.app import create_app
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.config_file import ConfigError
from parrot_gateway.settings.model import EngineLinkSettings, ModelSettings, Settings
from parrot_gateway.settings.sources import load_settings

KEY = {"Authorization": "Bearer the-admin-key"}


def client_of(settings: Settings) -> TestClient:
    # Without its lifespan: no engine is ever started.
    return TestClient(create_app(Gateway(settings)), base_url="http://127.0.0.1")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("PARROT_ADMIN_KEY", "the-admin-key")
    return client_of(
        Settings(
            models=[ModelSettings(model="/some/where", name="mine")],
            engines=EngineLinkSettings(hub_models=("good/*",)),
        )
    )


def test_without_a_key_they_are_off() -> None:
    for headers in ({}, KEY):
        answer = client_of(Settings()).get("/admin/v1/models", headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (403, "admin_routes_off")
        assert "server.admin_key" in error["message"]


@pytest.mark.parametrize("path", ["/admin/v1/models", "/admin/v1/models/mine"])
def test_the_key_of_calls_does_not_open_them(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("PARROT_API_KEY", "the-key-of-calls")
    monkeypatch.setenv("PARROT_ADMIN_KEY", "the-admin-key")
    client = client_of(Settings(models=[ModelSettings(model="some/model", name="mine")]))
    for headers in ({}, {"Authorization": "Bearer the-key-of-calls"}, {"x-api-key": "x"}):
        answer = client.get(path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_admin_key")
    assert client.get(path, headers=KEY).status_code == 200
    assert client.get(path, headers={"x-api-key": "the-admin-key"}).status_code == 200
    # And the other way round.
    assert client.get("/v1/models", headers=KEY).status_code == 401


def test_both_keys_cannot_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARROT_API_KEY", "one-key")
    monkeypatch.setenv("PARROT_ADMIN_KEY", "one-key")
    with pytest.raises(ConfigError, match=r"server\.admin_key"):
        load_settings()


def test_they_are_answered_while_the_gateway_drains(client: TestClient) -> None:
    gateway = Gateway(Settings(models=[ModelSettings(model="some/model", name="mine")]))
    gateway.gate.draining = True
    client = TestClient(create_app(gateway), base_url="http://127.0.0.1")
    assert client.get("/admin/v1/models", headers=KEY).status_code == 200
    assert client.post("/v1/completions", json={"model": "mine"}).status_code == 503


def test_a_model_of_the_settings_is_described(client: TestClient) -> None:
    listed = client.get("/admin/v1/models", headers=KEY).json()
    (model,) = listed["data"]
    assert (model["id"], model["state"], model["model"]) == ("mine", "loading", "/some/where")
    assert client.get("/admin/v1/models/mine", headers=KEY).json()["engines"][0]["pid"] is None
    missing = client.get("/admin/v1/models/owner/name", headers=KEY)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert client.put("/admin/v1/models", headers=KEY).status_code == 405


@pytest.mark.parametrize(
    ("route", "body", "status", "code", "param"),
    [
        ("load", {}, 400, "missing_required_parameter", "model"),
        ("load", {"model": 5}, 400, "invalid_type", "model"),
        ("load", {"model": ""}, 400, "invalid_value", "model"),
        ("load", {"model": "x" * 2000}, 400, "invalid_value", "model"),
        ("load", {"model": "a\x00b"}, 400, "invalid_value", "model"),
        ("load", {"model": "not a/name"}, 400, "invalid_value", "model"),
        ("load", {"model": "good/one", "name": " x"}, 400, "invalid_value", "name"),
        ("load", {"model": "good/one", "num_blocks": "x"}, 400, "invalid_value", "num_blocks"),
        ("load", {"model": "good/one", "memory_share": 2}, 400, "invalid_value", "memory_share"),
        ("load", {"model": "good/one", "blocks": 1}, 400, "unknown_parameter", "blocks"),
        ("load", {"model": "good/one", "wait": "yes"}, 400, "invalid_type", "wait"),
        ("load", {"model": "bad/one"}, 403, "repository_not_allowed", "model"),
        ("load", {"model": "/etc"}, 403, "path_not_allowed", "model"),
        ("load", {"model": "../x"}, 403, "path_not_allowed", "model"),
        ("load", {"model": "~nobody-at-all/x"}, 400, "invalid_value", "model"),
        ("load", {"model": "good/one", "trust_remote_code": True}, 403, "remote_code_not_allowed",
         "trust_remote_code"),
        ("load", {"model": "mine", "trust_remote_code": True}, 403, "remote_code_not_allowed",
         "trust_remote_code"),
        ("load", [1], 400, None, None),
        ("pull", {}, 400, "missing_required_parameter", "model"),
        ("pull", {"model": "bad/one"}, 403, "repository_not_allowed", "model"),
        ("pull", {"model": "/etc"}, 400, "invalid_value", "model"),
        ("pull", {"model": "good/one", "force": True}, 400, "unknown_parameter", "force"),
        ("cancel", {"model": "good/one"}, 404, "download_not_found", "model"),
        ("unload", {"model": "nothing"}, 404, "model_not_found", "model"),
        ("unload", {"model": ["mine"]}, 400, "invalid_type", "model"),
        # Allowed, but this gateway starts no engines.
        ("load", {"model": "parrot-demo"}, 503, "engine_overloaded", None),
        ("load", {"model": "mine", "name": "again"}, 503, "engine_overloaded", None),
    ],
)  # fmt: skip
def test_refusals(
    client: TestClient, route: str, body: Any, status: int, code: str | None, param: str | None
) -> None:
    answer = client.post(f"/admin/v1/models/{route}", json=body, headers=KEY)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error


def test_folders_that_the_operator_allows(client: TestClient, tmp_path: Path) -> None:
    inside = tmp_path / "models"
    inside.mkdir()
    (inside / "out").symlink_to("/etc")
    client = client_of(Settings(engines=EngineLinkSettings(model_folders=[inside])))
    statuses = {}
    for model in (inside / "one", inside / "out", inside / ".." / "other", f"{inside}-not"):
        answer = client.post("/admin/v1/models/load", json={"model": str(model)}, headers=KEY)
        statuses[str(model).removeprefix(str(tmp_path))] = answer.status_code
    # Only the first gets as far as that this gateway starts no engines.
    assert list(statuses.values()) == [503, 403, 403, 403], statuses
