"""Settings of any kind are refused by name or taken over whole; never half, never a 5xx."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from parrot_gateway.server.app import create_app
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.server.reload import LIVE, fields_of
from parrot_gateway.settings.model import Settings

ADMIN = {"Authorization": "Bearer the-admin-key"}
FIELDS = sorted(set(fields_of(Settings())) - {"models", "upstreams"})
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 10**6)
    | st.floats(0, 10)
    | st.text(max_size=5)
    | st.sampled_from(["info", "debug", "env:PATH", "env:NOT_SET_ANYWHERE", "pass", "parrot"])
    | st.lists(st.sampled_from(["lengths", "groups", "*", 3]), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)
)


@pytest.fixture(scope="module")
def gateway() -> Gateway:
    return Gateway(Settings())


@pytest.fixture
def client(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("PARROT_ADMIN_KEY", "the-admin-key")
    return TestClient(create_app(gateway), base_url="http://127.0.0.1")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def test_settings_are_taken_over_whole_or_not_at_all(
    client: TestClient, gateway: Gateway, changes: dict[str, Any]
) -> None:
    before = gateway.settings
    body = client.get("/admin/v1/config", headers=ADMIN).json()["settings"]
    for name, value in changes.items():
        section, _, field = name.partition(".")
        if field:
            body[section][field] = value
        else:
            body[section] = value
    answer = client.put(
        "/admin/v1/config", headers={**ADMIN, "If-Match": "*"}, content=json.dumps(body)
    )
    old, new = fields_of(before), fields_of(gateway.settings)
    changed = [name for name in old if old[name] != new[name]]
    if answer.status_code == 200:
        assert answer.json()["changed"] == changed
        assert set(changed) <= LIVE
        # What it answers with can be sent back.
        shown = answer.json()["settings"]
        again = client.put("/admin/v1/config", headers={**ADMIN, "If-Match": "*"}, json=shown)
        assert (again.status_code, again.json()["changed"]) == (200, [])
    else:
        assert answer.status_code in (400, 403, 409), answer.text
        assert changed == []
        assert answer.json()["error"]["message"]
