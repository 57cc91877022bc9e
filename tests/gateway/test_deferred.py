"""Deferred calls: answered at once with a reference, run by the gateway, feeding one another."""

from __future__ import annotations

import pytest
from scripted_remote import ScriptedRemoteEngine
from serving import Service

from parrot_gateway.core.reference import find_references


def echoing(engine: ScriptedRemoteEngine) -> None:
    """The engine says what it was asked, in angle brackets."""

    def script(prompt: list[int], sampling: object) -> list[int]:
        return engine.text("<" + engine.tokenizer.decode(prompt) + ">")

    engine.script = script  # type: ignore[assignment]


async def test_two_deferred_calls_feed_a_third(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    echoing(engine)
    async with service.client() as client:
        session = {"X-Parrot-Session": "story", "X-Parrot-Defer": "true"}
        first = await client.completions.create(
            model="m", prompt="a", extra_headers=session | {"X-Parrot-Output": "first"}
        )
        second = await client.completions.create(model="m", prompt="b", extra_headers=session)
        assert find_references(second.choices[0].text)
        third = await client.completions.create(
            model="m",
            prompt="{{one}} and " + second.choices[0].text,
            max_tokens=100,
            extra_headers={"X-Parrot-Session": "story", "X-Parrot-Input": "one=first"},
        )
    assert find_references(first.choices[0].text)
    assert third.choices[0].text == "<<a> and <b>>"
