"""`parrot-gateway explain`: why calls ran when and where they did, on a server with two engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess, wait_until
from typer.testing import CliRunner, Result

from parrot_gateway.cli.main import app

#: Two calls run at once, and all contexts together have 1,280 tokens.
MODEL = {"model": DEMO_MODEL, "engines": 2, "max_batch_size": 1, "num_blocks": 40}
LONG = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    with GatewayProcess(config={"models": [MODEL]}) as server:
        server.wait_idle()
        yield server


def explain(gateway: GatewayProcess, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments, "--base-url", gateway.base_url])


def ask(
    gateway: GatewayProcess, prompt: str, max_tokens: int = 2, session: str = "", **more: Any
) -> tuple[dict[str, str], Any]:
    body = {"model": DEMO_MODEL, "prompt": prompt, "max_tokens": max_tokens, **more}
    if session:
        body["parrot"] = {"session": session}
    status, headers, answer = gateway.post("/v1/completions", body)
    assert status == 200, answer
    return headers, answer


def text_of(gateway: GatewayProcess, session: str) -> str:
    """Return the text of the last call of a session, once it is known."""

    def known() -> list[str]:
        told = explain(gateway, "--session", session)
        return [line for line in told.stdout.splitlines() if ": " in line]

    return wait_until(known, f"a call of {session}")[-1].partition(": ")[2]


def test_a_prefix_is_told_with_what_other_engines_would_have_taken(gateway: GatewayProcess) -> None:
    headers, answer = ask(gateway, LONG)
    first = explain(gateway, headers["x-request-id"])
    assert first.exit_code == 0, first.output
    assert f"Ran on {DEMO_MODEL}-" in first.stdout
    assert " at once: none of its " in first.stdout
    assert "idle, would have taken" in first.stdout
    again, _ = ask(gateway, LONG + "Then it sleeps.")
    second = explain(gateway, again["x-request-id"]).stdout
    cached = int(second.split(" of its ")[0].rpartition(" ")[2])
    assert 0 < cached < answer["usage"]["prompt_tokens"]
    assert "prompt tokens were cached there" in second
    assert "to the end expected" in second
    assert ". It took " in second


def test_figures_as_json(gateway: GatewayProcess) -> None:
    headers, _ = ask(gateway, "Once")
    told = json.loads(explain(gateway, headers["x-request-id"], "--json").stdout)
    assert told["decided_by"] in ("load", "prefix")
    assert (told["held_s"], told["objective"]) == (0.0, "latency")
    chosen, other = told["alternatives"]
    assert chosen["engine"] == told["engine"] != other["engine"]
    assert chosen["predicted_s"] > 0 < other["predicted_s"]
    assert (chosen["has_room"], other["has_room"]) == (True, True)
    described = gateway.get(f"/v1/calls/{headers['x-request-id']}")
    assert described["explanation"] == told
    assert described["id"] == "call_" + headers["x-request-id"][-24:]


def test_held_and_queued_calls_tell_so_while_they_wait_and_after(gateway: GatewayProcess) -> None:
    _, answer = ask(gateway, LONG, 1)
    context = LONG * (560 // answer["usage"]["prompt_tokens"])
    ask(gateway, context, 1, "held")
    with ThreadPoolExecutor(4) as clients:
        running = [
            clients.submit(ask, gateway, f"{n} is", 400, f"runs-{n}", ignore_eos=True)
            for n in range(2)
        ]
        gateway.wait_running(2)
        # They are still there when the others have been looked at, however long that takes.
        with gateway.frozen_engines():
            # Comes back with a context that has no room beside these, and is dear to compute anew.
            large = clients.submit(ask, gateway, context + "Then", 8, "held")
            small = clients.submit(ask, gateway, "Well,", 2, "queued")
            gateway.wait_running(4)

            def both() -> bool:
                told = text_of(gateway, "held"), text_of(gateway, "queued")
                return "Held for " in told[0] and "Waits for an engine with room" in told[1]

            wait_until(both, "a call that is held, and one that is queued")
        for call in (*running, large, small):
            call.result()
    held, queued = text_of(gateway, "held"), text_of(gateway, "queued")
    assert "held with its application, until there was room" in held
    assert " in the queue: " in queued
    assert "held" not in queued
    drawn = gateway.get("/v1/sessions/queued/graph")
    assert [call["explanation"] for call in drawn["calls"]] == [queued]


def test_what_is_not_known_is_said(gateway: GatewayProcess) -> None:
    unknown = explain(gateway, "req_" + "0" * 32)
    assert (unknown.exit_code, "knows no call" in unknown.stderr) == (1, True)
    nowhere = explain(gateway, "--session", "nobody")
    assert (nowhere.exit_code, "nobody" in nowhere.stderr) == (1, True)
    assert explain(gateway).exit_code == 2
    assert explain(gateway, "call_1", "--session", "held").exit_code == 2
