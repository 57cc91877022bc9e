"""The OpenAPI document says what each route does; `/docs` shows it without a network."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from parrot_gateway.api.route_texts import ROUTES, TAGS
from parrot_gateway.server.app import create_app
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.model import Settings
from parrot_gateway.ui.static_files import REFERENCE, STATIC

METHODS = {"get", "post", "put", "patch", "delete"}


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(create_app(Gateway(Settings())))


@pytest.fixture(scope="module")
def document(client: TestClient) -> dict[str, Any]:
    loaded: dict[str, Any] = client.get("/openapi.json").json()
    return loaded


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    }


def test_every_route_says_what_it_does(document: dict[str, Any]) -> None:
    assert [tag["name"] for tag in document["tags"]][: len(TAGS)] == list(TAGS)
    named = {tag["name"] for tag in document["tags"]}
    for (method, path), operation in operations(document).items():
        assert operation["summary"], (method, path)
        assert "\n" not in operation["summary"]
        assert operation["description"], (method, path)
        assert set(operation["tags"]) <= named
        if operation["tags"] == ["calls"]:
            for status in ("4XX", "5XX"):
                assert re.search(r"\d{3} .*`\w+`", operation["responses"][status]["description"])


def test_no_text_is_of_a_route_that_is_gone(document: dict[str, Any]) -> None:
    assert set(ROUTES) <= set(operations(document))


def test_examples_are_as_the_document_says(document: dict[str, Any]) -> None:
    found = operations(document)
    for key, text in ROUTES.items():
        if text.example is None:
            continue
        content = found[key]["requestBody"]["content"]["application/json"]
        assert content["example"] == text.example, key
        # References are those of the whole document.
        schema = {**content["schema"], "components": document["components"]}
        jsonschema.validate(text.example, schema)
    for key, operation in found.items():
        if operation["tags"] == ["calls"]:
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content is not None and "$ref" in content["schema"]:
                assert "example" in content, key


def test_the_page_of_the_routes_needs_no_other_host(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    files = re.findall(r'(?:src|href)="(ui/reference/[^"]+)"', page.text)
    assert len(files) == 2
    texts = [page.text]
    for file in files:
        answer = client.get(f"/{file}")
        assert answer.status_code == 200
        texts.append(answer.text)
    for text in texts:
        assert not re.search(r"""https?://|["'(]//""", text)
    assert 'fetch("openapi.json")' in texts[-1]
    assert {path.name for path in (STATIC / "reference").iterdir()} == {
        file.rpartition("/")[2] for file in files
    }
    assert "<script>" not in REFERENCE.read_text()
