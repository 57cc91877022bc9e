"""The root of a gateway, as a browser sees it."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from parrot_gateway.server.app import create_app
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.model import Settings

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.mark.parametrize("key", ["", "secret"])
def test_a_browser_gets_a_page_and_a_program_an_error(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("PARROT_API_KEY", key)
    client = TestClient(create_app(Gateway(Settings())))
    redirect = client.get("/", headers=BROWSER, follow_redirects=False)
    assert (redirect.status_code, redirect.headers["location"]) == (307, "ui/")
    page = client.get("/", headers=BROWSER)
    assert page.status_code == 200
    assert page.url.path == "/ui/"
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for link in ("/docs", "/openapi.json", "/v1/models", "/health"):
        assert f'href="..{link}"' in page.text
    answer = client.get("/")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_route"
