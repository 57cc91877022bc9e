"""Calls that nobody declared are linked, on a real process and with the real client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from harness.processes import DEMO_MODEL, GatewayProcess, is_alive, upstream_settings, wait_until
from harness.scripted_upstream import ScriptedUpstream, chat_document, document, error
from openai.types.chat import ChatCompletionMessageParam

Chat = list[ChatCompletionMessageParam]
STORY = (
    "The heron waited in the reeds until the fox came down to drink, and neither of them spoke "
    "of the duck that both had seen an hour before on the far side of the pond."
)


@pytest.fixture(scope="module")
def linking(upstream: ScriptedUpstream) -> Iterator[GatewayProcess]:
    """A gateway that names calls and sessions in its answers."""
    with GatewayProcess(
        config={
            "upstreams": [upstream_settings("scripted", upstream.base_url)],
            "linking": {"headers": True},
        }
    ) as gateway:
        wait_until(lambda: health(gateway)["running"], "the linking process")
        yield gateway


def client_of(gateway: GatewayProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.base_url, api_key=gateway.api_key or "none")


def get(gateway: GatewayProcess, path: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {gateway.api_key}"} if gateway.api_key else {}
    return httpx.get(f"{gateway.base_url}{path}", headers=headers, timeout=60)


def health(gateway: GatewayProcess) -> dict[str, Any]:
    return dict(get(gateway, "/../health").json()["linking"])


def links_of(gateway: GatewayProcess, response_id: str) -> set[tuple[str, str]]:
    call = get(gateway, f"/calls/{response_id}").json()
    return {(link["from"], link["kind"]) for link in call["links"]}


def call_of(gateway: GatewayProcess, response_id: str) -> dict[str, Any]:
    return dict(get(gateway, f"/calls/{response_id}").json())


def test_a_loop_and_a_join_on_an_own_model(demo: GatewayProcess) -> None:
    wait_until(lambda: health(demo)["running"], "the linking process")
    client = client_of(demo)
    question: Chat = [{"role": "user", "content": "Tell me of a heron, a fox and a lake."}]
    first = client.chat.completions.create(
        model=DEMO_MODEL, messages=question, max_tokens=60, temperature=1.2, seed=5
    )
    text = first.choices[0].message.content or ""
    turns: Chat = [
        *question,
        {"role": "assistant", "content": text},
        {"role": "user", "content": "Go on."},
    ]
    stream = client.chat.completions.create(
        model=DEMO_MODEL, messages=turns, max_tokens=8, stream=True
    )
    second = next(chunk.id for chunk in list(stream))
    third = client.completions.create(
        model=DEMO_MODEL, prompt=f"Check this text:\n\n> {text}\n", max_tokens=4
    )
    source = call_of(demo, first.id)
    assert source["inferred"]
    assert source["state"] == "done"
    assert links_of(demo, second) == {(source["id"], "continues")}
    assert links_of(demo, third.id) == {(source["id"], "output")}
    session = source["session"]
    assert call_of(demo, third.id)["session"] == session
    assert session in [each["id"] for each in get(demo, "/sessions").json()["data"]]
    graph = get(demo, f"/sessions/{session}/graph").json()
    assert graph["inferred"]
    assert [call["stage"] for call in graph["calls"]] == [0, 1, 1]
    assert {link["kind"] for link in graph["links"]} == {"continues", "output"}
    assert "-.->" in get(demo, f"/sessions/{session}/graph?format=mermaid").text


def test_responses_of_an_own_model(demo: GatewayProcess) -> None:
    wait_until(lambda: health(demo)["running"], "the linking process")
    client = client_of(demo)
    first = client.responses.create(
        model=DEMO_MODEL, input="Tell me of a ship.", max_output_tokens=16
    )
    second = client.responses.create(
        model=DEMO_MODEL, input="Go on.", previous_response_id=first.id, max_output_tokens=16
    )
    source = call_of(demo, first.id)
    assert links_of(demo, second.id) == {(source["id"], "continues")}


def answer(text: str) -> Any:
    return document(chat_document(text))


def test_upstream_answers_are_linked_and_named(
    linking: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(answer(STORY), answer("Fine."), answer("Fine."))
    client = client_of(linking)
    one = client.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": "A story."}]
    )
    two = client.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": f"Check: {STORY}"}]
    )
    call = call_of(linking, two.headers["x-request-id"])
    assert call["id"] == two.headers["x-parrot-call"]
    assert [link["from"] for link in call["links"]] == [one.headers["x-parrot-call"]]
    assert call["session"] == one.headers["x-parrot-session"] == two.headers["x-parrot-session"]
    off = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": f"Check: {STORY}"}],
        extra_headers={"X-Parrot-Link": "off"},
    )
    assert "x-parrot-call" not in off.headers
    assert get(linking, f"/calls/{off.headers['x-request-id']}").status_code == 404


def test_equal_calls_are_told_apart_by_their_connections(
    linking: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(*[answer(STORY)] * 8)
    clients = [client_of(linking) for _ in range(4)]
    begun: Chat = [{"role": "user", "content": "Tell me of the pond, the reeds and the duck."}]
    turns: Chat = [
        *begun,
        {"role": "assistant", "content": STORY},
        {"role": "user", "content": "Go on."},
    ]
    firsts = [
        client.chat.completions.with_raw_response.create(model=model, messages=begun)
        for client in clients
    ]
    for which in (2, 0, 3, 1):
        second = clients[which].chat.completions.with_raw_response.create(
            model=model, messages=turns
        )
        links = call_of(linking, second.headers["x-request-id"])["links"]
        assert [link["from"] for link in links] == [firsts[which].headers["x-parrot-call"]]


def test_garbage_is_passed_on_and_linked_to_nothing(
    linking: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    body = {"model": upstream.script(error(400)), "messages": [1, {"role": 2}]}
    response = httpx.post(f"{linking.base_url}/chat/completions", json=body)
    assert response.status_code == 400
    call = get(linking, f"/calls/{response.headers['x-request-id']}").json()
    assert call["links"] == []
    assert call["state"] == "failed"


def test_a_lost_process_is_started_again(
    linking: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    before = health(linking)
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: health(linking)["restarts"] > before["restarts"], "the loss is noticed")
    model = upstream.script(answer("Still here."))
    reply = client_of(linking).chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Are you there?"}]
    )
    assert reply.choices[0].message.content == "Still here."
    wait_until(lambda: health(linking)["running"], "another process")
    assert not is_alive(before["pid"])
    assert get(linking, "/sessions").status_code == 200


def test_calls_can_be_kept_out_altogether(upstream: ScriptedUpstream) -> None:
    with GatewayProcess(
        config={
            "upstreams": [upstream_settings("scripted", upstream.base_url)],
            "linking": {"enabled": False},
        }
    ) as gateway:
        model = upstream.script(answer("Fine."))
        reply = client_of(gateway).chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Are you there?"}]
        )
        assert get(gateway, f"/calls/{reply.id}").status_code == 404
        assert get(gateway, "/sessions").json()["data"] == []
        assert not health(gateway)["running"]


def test_profiles_outlive_a_restart_and_the_process_does_not(
    upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    config = {
        "upstreams": [upstream_settings("scripted", upstream.base_url)],
        "linking": {"profiles_file": str(tmp_path / "profiles")},
    }
    with GatewayProcess(config=config) as gateway:
        wait_until(lambda: health(gateway)["running"], "the linking process")
        pid = health(gateway)["pid"]
        client, numbers = client_of(gateway), count()
        model = upstream.script(*[answer("There are three.")] * 1000)

        def ask() -> list[dict[str, Any]]:
            question = f"{next(numbers) * 7919 % 97} herons?"
            client.chat.completions.create(
                model=model,
                messages=[
                    {"role": "system", "content": STORY},
                    {"role": "user", "content": question},
                ],
            )
            return profiles(gateway)

        # Calls of one moment may be one session's: they teach nothing of templates.
        wait_until(ask, "a profile")
        learned = wait_until(lambda: ask()[0]["calls"] and profiles(gateway), "an answer")
        assert STORY[:20] not in str(learned)
    wait_until(lambda: not is_alive(pid), "the end of the linking process")
    with GatewayProcess(config=config) as gateway:
        wait_until(lambda: profiles(gateway) == learned, "the profiles of before")
    assert STORY[:20].encode() not in (tmp_path / "profiles").read_bytes()


def profiles(gateway: GatewayProcess) -> list[dict[str, Any]]:
    return list(get(gateway, "/linking/profiles").json()["data"])
