"""Many calls at once: each gets its own answer, the same as if it had been alone."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness.processes import DEMO_MODEL, GatewayProcess
from harness.raw_http import RawConnection, check_error
from harness.scripted_upstream import ScriptedUpstream, chat_document, chat_events, document
from harness.scripted_upstream import event_stream as events

PROMPTS = [
    "Once upon a time",
    "The king said",
    "“No,” said Alice",
    "It was a dark night and",
    "In the morning the old man went to the sea, and there",
    "Two dogs",
    "She",
    "My dear Watson, you see",
]


def tell(demo: GatewayProcess, number: int, stream: bool) -> str:
    body: dict[str, Any] = {
        "model": DEMO_MODEL,
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    response = demo.ask("POST", "/v1/completions", body)
    assert response.status == 200, response.body
    if stream:
        return "".join(chunk["choices"][0]["text"] for chunk in response.chunks)
    return str(response.json["choices"][0]["text"])


def test_a_crowd_is_answered_as_each_one_alone(demo: GatewayProcess) -> None:
    alone = [tell(demo, number, stream=False) for number in range(len(PROMPTS))]
    assert len(set(alone)) == len(PROMPTS)
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda n: tell(demo, n, stream=n % 2 == 0), range(48)))
    for number, text in enumerate(together):
        assert text == alone[number % len(PROMPTS)]
    demo.wait_idle()


def test_thousands_of_prompts_in_one_call(demo: GatewayProcess) -> None:
    """More than the 1,024 that an engine lets wait, while somebody else asks too."""
    prompts = [f"Number {number}" for number in range(1100)]
    body = {"model": DEMO_MODEL, "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 0}
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(demo.post, "/v1/completions", body)
        small = pool.submit(tell, demo, 0, stream=True)
        assert small.result()
        status, _, answer = large.result()
    assert status == 200, answer
    assert [choice["text"] for choice in answer["choices"]] == prompts
    demo.wait_idle()


def test_a_crowd_passes_through_unmixed(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    raws: dict[str, bytes] = {}
    for number in range(60):
        if number % 2:
            raw = json.dumps(chat_document(f"answer {number} " * number)).encode()
            raws[upstream.script(document(raw))] = raw
        else:
            parts = chat_events([f"word {number}.{i} " for i in range(number)])
            raws[upstream.script(events(*parts))] = b"".join(parts)

    def ask(model: str) -> bytes:
        with RawConnection(relay.port) as connection:
            body = {"model": model, "messages": [], "stream": raws[model].startswith(b"data")}
            return connection.ask("POST", "/v1/chat/completions", body).body

    with ThreadPoolExecutor(30) as pool:
        answers = dict(zip(raws, pool.map(ask, raws), strict=True))
    assert answers == raws
    relay.wait_running(0)


def test_a_long_prompt_holds_nobody_up(demo: GatewayProcess) -> None:
    """Tokenizing takes a while; others are answered meanwhile, again and again."""
    long = {"model": DEMO_MODEL, "prompt": "word " * 200_000}
    message = {"role": "user", "content": "word word word word"}
    chat = {"model": DEMO_MODEL, "messages": [message] * 16_000}
    for path, body in (("/v1/completions", long), ("/v1/chat/completions", chat)):
        with (
            RawConnection(demo.port, api_key=demo.api_key) as busy,
            RawConnection(demo.port) as other,
            ThreadPoolExecutor(1) as pool,
        ):
            # Completions refuse such texts without tokenizing them; this route does not.
            answer = pool.submit(busy.ask, "POST", "/tokenize", body)
            answered = 0
            while not answer.done():
                assert other.ask("GET", "/health/liveness").status == 200
                answered += 1
            assert answer.result().json["count"] >= 100_000
            refused = busy.ask("POST", path, body)
            error = check_error(refused, 400, "context_length_exceeded")
            assert "at least" in error["message"]
        assert answered > 10
