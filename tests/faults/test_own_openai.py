"""An engine killed under the real `openai` client: every promise of an answer holds.

The engine dies when a certain chunk has arrived, not at a certain time. The demo model computes in
float32: what comes after the loss is what would have come without, byte for byte.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from harness.processes import DEMO_MODEL, GatewayProcess, wait_until
from harness.raw_http import RawConnection

#: What a call says, as plain values, when it is asked with `tick` called for each chunk.
Ask = Callable[[openai.OpenAI, Callable[[], None]], Any]

MESSAGES: list[Any] = [{"role": "user", "content": "Tell a story about a parrot and a king."}]
#: Chunks of the first call after which its engine is killed.
KILLED_AFTER = 25
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 6},
        "kind": {"enum": ["parrot", "king"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "fly", "description": "Fly somewhere.", "parameters": SCHEMA},
}


def chat(client: openai.OpenAI, tick: Callable[[], None], **options: Any) -> Any:
    """A streamed chat: texts, reasons, log-probabilities and tool calls by choice, and usage."""
    extra = {"ignore_eos": True, **options.pop("extra_body", {})}
    if "response_format" in options or "tools" in options:
        del extra["ignore_eos"]
    stream = client.chat.completions.create(
        model=DEMO_MODEL,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **{"max_tokens": 90, "extra_body": extra, **options},
    )
    found: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in stream:
        tick()
        if chunk.usage is not None:
            assert usage is None
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            entry = found.setdefault(
                choice.index, {"text": "", "tools": {}, "end": None, "tokens": []}
            )
            assert entry["end"] is None, "more after the end"
            entry["text"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                function = call.function
                assert function is not None
                name, arguments = entry["tools"].get(call.index, ("", ""))
                entry["tools"][call.index] = (
                    name + (function.name or ""),
                    arguments + (function.arguments or ""),
                )
            if choice.logprobs is not None and choice.logprobs.content is not None:
                for token in choice.logprobs.content:
                    top = [(each.token, round(each.logprob, 3)) for each in token.top_logprobs]
                    entry["tokens"].append((token.token, round(token.logprob, 3), top))
            entry["end"] = choice.finish_reason
    return found, usage


def schema(client: openai.OpenAI, tick: Callable[[], None], **options: Any) -> Any:
    """A chat that has to follow a JSON schema."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    found, usage = chat(client, tick, response_format=form, **options)
    for entry in found.values():
        written = json.loads(entry["text"])
        assert written.keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
        assert 3 <= len(written["ages"]) <= 6
    return found, usage


def tool(client: openai.OpenAI, tick: Callable[[], None], **options: Any) -> Any:
    """A chat that has to call a tool."""
    choice = {"type": "function", "function": {"name": "fly"}}
    found, usage = chat(client, tick, tools=[TOOL], tool_choice=choice, **options)
    (name, arguments) = found[0]["tools"][0]
    assert name == "fly"
    assert json.loads(arguments).keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
    return found, usage


def complete(client: openai.OpenAI, tick: Callable[[], None], **options: Any) -> Any:
    """A completion of several prompts, not streamed."""
    answer = client.completions.create(
        model=DEMO_MODEL,
        prompt=["Once upon a time", "The king", "A parrot"],
        **{"max_tokens": 60, "extra_body": {"ignore_eos": True}, **options},
    )
    assert answer.usage is not None
    texts = [(each.index, each.text, each.finish_reason) for each in answer.choices]
    return texts, (answer.usage.prompt_tokens, answer.usage.completion_tokens)


def of(ask: Callable[..., Any], **options: Any) -> Ask:
    return lambda client, tick: ask(client, tick, **options)


#: The first one is the clock.
CASES: dict[str, Ask] = {
    "greedy": of(chat, temperature=0, max_tokens=150),
    "seeded": of(chat, seed=5, top_p=0.9),
    "several candidates": of(chat, seed=7, n=3),
    "penalties": of(chat, seed=3, frequency_penalty=1.2, presence_penalty=0.4),
    "repetition": of(chat, temperature=0, extra_body={"repetition_penalty": 1.3}),
    "stop": of(chat, temperature=0, stop=["parrot went", "zzz"]),
    "least tokens": of(chat, seed=4, extra_body={"min_tokens": 60, "ignore_eos": False}),
    "log-probabilities": of(chat, seed=6, logprobs=True, top_logprobs=2),
    "schema": of(schema, seed=8),
    "schemas": of(schema, seed=9, n=2),
    "tool": of(tool, seed=10),
    "prompts": of(complete, seed=11, echo=True),
    "the best": of(complete, seed=12, n=2, best_of=3),
}


def gateway_of(engines: int) -> GatewayProcess:
    return GatewayProcess(
        config={
            "models": [{"model": DEMO_MODEL, "engines": engines, "seed": 21}],
            "server": {"keep_alive_s": 0.2},
        }
    )


@pytest.fixture(scope="module")
def calm() -> Iterator[GatewayProcess]:
    """A gateway whose engine lives."""
    with gateway_of(1) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def struck() -> Iterator[GatewayProcess]:
    """A gateway whose engines die."""
    with gateway_of(2) as gateway:
        yield gateway


def client_of(gateway: GatewayProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0, timeout=100)


def busiest(gateway: GatewayProcess) -> int:
    """The process of the engine with most contexts."""
    health = gateway.health()
    name = max(health["engines"], key=lambda each: each["running"])["name"]
    (pid,) = [each["pid"] for each in health["engine_processes"] if each["name"] == name]
    return int(pid)


def killing(gateway: GatewayProcess, after: int) -> Callable[[], None]:
    """Kills the busiest engine when it was called so often."""
    left = [after]

    def tick() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(busiest(gateway), signal.SIGKILL)

    return tick


def count(gateway: GatewayProcess, metric: str) -> float:
    """The sum of a metric over its labels."""
    with RawConnection(gateway.port) as connection:
        text = connection.ask("GET", "/metrics").body.decode()
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(metric)
    )


def test_a_call_without_a_seed_goes_on_in_its_random_stream(
    calm: GatewayProcess, struck: GatewayProcess
) -> None:
    """The first calls of both gateways: their seeds are drawn from the model's `seed`."""
    ask = of(chat, temperature=1)
    with client_of(calm) as client:
        whole = ask(client, lambda: None)
    with client_of(struck) as client:
        assert ask(client, killing(struck, KILLED_AFTER)) == whole
    assert count(struck, "parrot_call_engine_losses_total") == 1


def test_an_engine_killed_under_calls_of_every_kind(
    calm: GatewayProcess, struck: GatewayProcess
) -> None:
    with client_of(calm) as client:
        whole = {name: ask(client, lambda: None) for name, ask in CASES.items()}
    wait_until(lambda: len(struck.health()["engines"]) == 2, "both engines are there", 60)
    before = count(struck, "parrot_call_engine_losses_total")
    clock, *others = CASES
    with client_of(struck) as client, ThreadPoolExecutor(len(CASES)) as pool:
        asked = {name: pool.submit(CASES[name], client, lambda: None) for name in others}
        struck.wait_running(len(others))
        asked[clock] = pool.submit(CASES[clock], client, killing(struck, KILLED_AFTER))
        answers = {name: future.result() for name, future in asked.items()}
    for name, answer in answers.items():
        assert answer == whole[name], name
    assert count(struck, "parrot_call_engine_losses_total") - before >= 3
    assert count(struck, "parrot_failover_refilled_tokens_total") > 0


def test_a_stream_survives_the_only_engine(calm: GatewayProcess) -> None:
    """It waits until the engine was started again; comments keep the connection alive."""
    with client_of(calm) as client:
        whole = CASES["seeded"](client, lambda: None)
        assert CASES["seeded"](client, killing(calm, KILLED_AFTER)) == whole
    assert calm.health()["engine_processes"][0]["restarts"] == 1
