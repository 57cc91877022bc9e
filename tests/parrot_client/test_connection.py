"""Address and key, and the `openai` clients that a connection makes."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from parrot_client.connection import (
    API_KEY_VARIABLES,
    BASE_URL_VARIABLES,
    DEFAULT_BASE_URL,
    Connection,
    OpenAIClients,
    default_api_key,
    default_base_url,
)


def test_the_first_variable_that_is_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*BASE_URL_VARIABLES, *API_KEY_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    assert default_base_url() == DEFAULT_BASE_URL
    assert default_api_key() is None
    for name in reversed(BASE_URL_VARIABLES):
        monkeypatch.setenv(name, f" http://{name.lower()}/v1 ")
        assert default_base_url() == f"http://{name.lower()}/v1"
    for name in reversed(API_KEY_VARIABLES):
        monkeypatch.setenv(name, name)
        assert default_api_key() == name
    monkeypatch.setenv(BASE_URL_VARIABLES[0], " ")
    assert default_base_url() == f"http://{BASE_URL_VARIABLES[1].lower()}/v1"


@pytest.mark.parametrize("url", ["http://h/v1", "http://h/v1/", "http://h"])
def test_the_root_is_above_v1(url: str) -> None:
    assert Connection(url).root == "http://h"


def test_what_is_not_given_is_the_clients_own_default() -> None:
    assert Connection("http://h/v1").options().keys() == {
        "base_url",
        "api_key",
        "default_headers",
        "default_query",
    }
    client = OpenAIClients(Connection("http://h/v1", timeout=3.0, max_retries=0)).sync()
    assert (client.timeout, client.max_retries) == (3.0, 0)
    # The client insists on a key.
    assert client.api_key


def test_the_key_and_headers_are_not_shown() -> None:
    connection = Connection("http://h/v1", "secret-key", headers={"X": "secret-header"})
    assert "secret" not in repr(connection)


def test_threads_share_one_client() -> None:
    clients = OpenAIClients(Connection("http://h/v1"))
    with ThreadPoolExecutor(8) as threads:
        made = set(threads.map(lambda _: id(clients.sync()), range(50)))
    assert len(made) == 1


def test_every_event_loop_has_a_client_that_goes_with_it() -> None:
    clients = OpenAIClients(Connection("http://h/v1"))

    async def both() -> tuple[Any, Any]:
        return clients.of_running_loop(), clients.of_running_loop()

    first = asyncio.run(both())
    second = asyncio.run(both())
    assert first[0] is first[1]
    assert second[0] is second[1]
    assert first[0] is not second[0]
    assert clients.num_loops == 1
    with pytest.raises(RuntimeError):
        clients.of_running_loop()


def test_a_client_of_the_users_is_never_closed() -> None:
    own = httpx.AsyncClient()

    async def use(clients: OpenAIClients) -> None:
        clients.of_running_loop()

    def use_in_two_loops() -> None:
        clients = OpenAIClients(Connection("http://h/v1", http_async_client=own))
        for _ in range(2):
            asyncio.run(use(clients))

    use_in_two_loops()
    gc.collect()
    assert not own.is_closed


def test_copies_open_connections_of_their_own() -> None:
    clients = OpenAIClients(Connection("http://h/v1", "k", timeout=3.0))
    client = clients.sync()
    for other in (copy.deepcopy(clients), pickle.loads(pickle.dumps(clients))):
        assert other.connection == clients.connection
        assert other.sync() is not client


def test_importing_it_imports_no_library() -> None:
    code = (
        "import sys; from parrot_client import connection, errors, fields, versions;"
        "print(*[m for m in ('openai', 'httpx', 'pydantic', 'parrot_gateway') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.stdout.strip(), ran.returncode) == ("", 0), ran.stderr
