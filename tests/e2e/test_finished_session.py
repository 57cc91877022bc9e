"""KV of a finished session goes first; that of one that may come back outlives other prompts."""

from __future__ import annotations

from harness.processes import DEMO_MODEL, GatewayProcess
from harness.raw_http import RawConnection

NUM_BLOCKS = 256
BLOCK_TOKENS = 16
SENTENCE = " spoke of the sea and of the ships that never came home again."


def prompt(name: str, sentences: int) -> str:
    """Text that shares no beginning with that of another name."""
    return f"{name}:" + f" {name}{SENTENCE}" * sentences


def usage(connection: RawConnection, text: str, session: str | None = None) -> tuple[int, int]:
    """Complete a text: the tokens of its prompt, and how many of them were found in the cache."""
    body: dict[str, object] = {"model": DEMO_MODEL, "prompt": text, "max_tokens": 2}
    if session is not None:
        body["parrot"] = {"session": session}
    answer = connection.ask("POST", "/v1/completions", body)
    assert answer.status == 200, answer.body
    used = answer.json["usage"]
    return used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"]


def test_a_deleted_session_keeps_nothing_on_its_engine() -> None:
    settings = {"model": DEMO_MODEL, "num_blocks": NUM_BLOCKS, "block_size": BLOCK_TOKENS}
    with (
        GatewayProcess(config={"models": [settings]}) as gateway,
        RawConnection(gateway.port) as connection,
    ):
        for name in ("finished", "paused"):
            usage(connection, prompt(name, 10), session=name)
            # A prompt that goes on from the one before: the session is kept for its next turn.
            tokens, cached = usage(connection, prompt(name, 20), session=name)
            assert cached > tokens // 3
        assert connection.ask("DELETE", "/v1/sessions/finished", None).status in (200, 204)
        others = number = 0
        while others < 2 * NUM_BLOCKS * BLOCK_TOKENS:
            tokens, _ = usage(connection, prompt(f"other {number}", 20))
            others += tokens
            number += 1
        assert usage(connection, prompt("finished", 20))[1] == 0
        assert usage(connection, prompt("paused", 20))[1] > 0
