"""Parrot's own API on real gateway processes: the whole flow, keys, upstreams, the guide."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from harness.gateway.parrot_v3_client import V3Client, V3Error, Var
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess, upstream_settings
from harness.scripted_upstream import ScriptedUpstream, document, error

GUIDE = Path(__file__).parents[4] / "docs" / "parrot-api.md"
GREEDY = {"temperature": 0.0, "ignore_tokenizer_eos": True}
GAUGES = ("waiting", "in_line", "running", "held_bytes", "tasks")


@pytest.fixture(scope="module")
def open_gateway() -> Iterator[GatewayProcess]:
    """A gateway without a key, with the demo model on a real engine process."""
    with GatewayProcess(config={"models": [{"model": DEMO_MODEL, "num_blocks": 512}]}) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def front(upstream: ScriptedUpstream) -> Iterator[GatewayProcess]:
    """A gateway with a key, in front of an upstream, that takes Parrot's calls without one."""
    with GatewayProcess(
        config={
            "upstreams": [upstream_settings("scripted", upstream.base_url, max_retries=0)],
            "parrot_v3": {"keyless": True, "keyless_tenant": "guests", "get_timeout_s": 0.3},
        },
        api_key=API_KEY,
    ) as gateway:
        yield gateway


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(verify=False) as http:
        yield http


def left_over(gateway: GatewayProcess) -> dict[str, Any]:
    """Return the gauges that are not back to zero."""
    described = gateway.health()["semantic"]
    counts = {name: described["calls"][name] for name in GAUGES}
    counts |= {name: described["sessions"][name] for name in ("sessions", "variables")}
    counts["readers"] = described["readers"]
    return {name: count for name, count in counts.items() if count}


async def test_the_whole_flow(open_gateway: GatewayProcess, http: httpx.AsyncClient) -> None:
    client = V3Client(open_gateway.root, http)
    await client.register()
    topic = await client.variable("topic")
    first = await client.call(
        "A story about {{topic}}:{{story}}\nIts moral:{{moral}}",
        {"topic": topic},
        {
            "story": {**GREEDY, "max_gen_length": 12},
            "moral": {**GREEDY, "max_gen_length": 8, "stop_str": "\n\n"},
        },
    )
    second = await client.call(
        "Again, {{moral}} {{style}}:{{poem}}",
        {"moral": first["moral"], "style": Var("style", value="as a poem")},
        {"poem": {**GREEDY, "max_gen_length": 10, "logit_bias": {"5": 1}}},
        models=["unheard-of", DEMO_MODEL],
    )
    reader = asyncio.create_task(client.get(second["poem"], "latency"))
    await client.set(topic, "a parrot")
    poem = await reader
    story = await client.get(first["story"], "TTFT")
    moral = await client.get(first["moral"], "TPOT")

    async def complete(prompt: str, max_tokens: int, **fields: Any) -> str:
        body = {
            "model": DEMO_MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "repetition_penalty": 1.0,
            **fields,
        }
        answer = await http.post(f"{open_gateway.base_url}/completions", json=body, timeout=60)
        text: str = answer.json()["choices"][0]["text"]
        return text

    prompt = "A story about a parrot:"
    assert story == await complete(prompt, 12)
    assert moral == await complete(f"{prompt}{story}\nIts moral:", 8, stop="\n\n")
    assert poem == await complete(f"Again, {moral} as a poem:", 10, logit_bias={"5": 1})
    assert story
    assert poem
    await client.remove()
    assert left_over(open_gateway) == {}


async def test_models_that_are_not_served(
    open_gateway: GatewayProcess, http: httpx.AsyncClient
) -> None:
    client = V3Client(open_gateway.root, http)
    await client.register()
    with pytest.raises(V3Error, match="'unheard-of'") as caught:
        await client.call("Hello {{out}}", models=["unheard-of"])
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert caught.value.error["param"] == "models"
    await client.remove()
    assert left_over(open_gateway) == {}


def test_the_example_of_the_guide_runs(
    open_gateway: GatewayProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    code = GUIDE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    exec(code.replace("http://127.0.0.1:8000", open_gateway.root), {})
    assert capsys.readouterr().out.strip()
    assert left_over(open_gateway) == {}


def test_the_guide_names_every_field_and_route() -> None:
    from parrot_gateway.api.parrot_v3 import bodies as bodies

    guide = re.sub(r"```.*?```", "", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", guide))))
    for kind in (
        bodies.SemanticCallBody,
        bodies.Parameter,
        bodies.SamplingConfig,
        bodies.TransformBody,
        bodies.SetVariableBody,
        bodies.GetVariableBody,
        bodies.NewVariableBody,
    ):
        assert set(kind.__struct_fields__) <= named


# --- keys -----------------------------------------------------------------------------------------


async def test_a_gateway_with_a_key_wants_it(demo: GatewayProcess, http: httpx.AsyncClient) -> None:
    client = V3Client(demo.root, http)
    for headers in ({}, {"authorization": "Bearer wrong"}):
        client.headers = headers
        with pytest.raises(V3Error) as caught:
            await client.register()
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    client.headers = {"authorization": f"Bearer {API_KEY}"}
    await client.register()
    out = (await client.call("Hello{{out}}", None, {"out": {"max_gen_length": 2}}))["out"]
    assert isinstance(await client.get(out), str)
    # The session is the key's; without the key it is not even looked for.
    keyed, client.headers = client.headers, {}
    with pytest.raises(V3Error) as caught:
        await client.get(out)
    assert caught.value.status == 401
    client.headers = keyed
    await client.remove()


async def test_calls_without_a_key_are_taken_where_the_operator_says_so(
    front: GatewayProcess, http: httpx.AsyncClient
) -> None:
    guest = V3Client(front.root, http)
    await guest.register()
    variable = await guest.variable("v", "secret")
    # A tenant of their own: the very ids and proofs are nothing to the key's owner.
    guest.headers = {"authorization": f"Bearer {API_KEY}"}
    with pytest.raises(V3Error) as caught:
        await guest.get(variable)
    assert (caught.value.status, caught.value.code) == (404, "session_not_found")
    guest.headers = {"authorization": "Bearer wrong"}
    with pytest.raises(V3Error) as caught:
        await guest.get(variable)
    assert caught.value.status == 401
    guest.headers = {}
    assert await guest.get(variable) == "secret"
    # All other routes want the key as ever.
    assert (await http.get(f"{front.base_url}/models")).status_code == 401
    await guest.remove()


async def test_every_wait_ends(front: GatewayProcess, client: V3Client) -> None:
    never = await client.variable("never")
    with pytest.raises(V3Error, match="never") as caught:
        await client.get(never)
    assert (caught.value.status, caught.value.code) == (504, "timeout")
    await client.remove()
    assert left_over(front) == {}


# --- upstreams ------------------------------------------------------------------------------------


def completion(text: str) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
    return {"id": "1", "object": "text_completion", "choices": [choice]}


def chat(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "choices": [choice]}


@pytest_asyncio.fixture
async def client(front: GatewayProcess, http: httpx.AsyncClient) -> V3Client:
    """A client with a session."""
    client = V3Client(front.root, http)
    await client.register()
    return client


async def get_in_time(client: V3Client, variable: Var) -> str:
    """This gateway's waits are short."""
    for _ in range(100):
        try:
            return await client.get(variable)
        except V3Error as failure:
            if failure.status != 504:
                raise
    raise AssertionError("no value")


async def test_models_of_upstreams_complete_texts(
    front: GatewayProcess, upstream: ScriptedUpstream, client: V3Client
) -> None:
    model = upstream.script(document(completion("one")), document(completion("two")))
    outputs = {"a": {}, "b": {"max_gen_length": 3, "stop_str": ["."], "repetition_penalty": 1.1}}
    call = await client.call("Say {{a}} and {{b}}", None, outputs, models=[f"scripted/{model}"])
    assert await get_in_time(client, call["b"]) == "two"
    assert await get_in_time(client, call["a"]) == "one"
    first, second = upstream.wait_for_calls(model, 2)
    assert (first.target, second.target) == ("/v1/completions", "/v1/completions")
    plain = {"model": model, "temperature": 1.0, "top_p": 1.0}
    asked = [
        {k: v for k, v in json.loads(c.body).items() if k != "stream"} for c in (first, second)
    ]
    assert asked[0] == {**plain, "prompt": "Say ", "max_tokens": 512}
    assert asked[1] == {
        **plain,
        "prompt": "Say one and ",
        "max_tokens": 3,
        "stop": ["."],
        "repetition_penalty": 1.1,
    }
    await client.remove()
    assert left_over(front) == {}


async def test_text_models_of_upstreams_are_spoken_to_in_messages(
    front: GatewayProcess, upstream: ScriptedUpstream, client: V3Client
) -> None:
    model = upstream.script(document(chat("one")), document(chat("two")))
    call = await client.call(
        "Say {{a}} and {{b}}",
        None,
        {"a": {}, "b": {}},
        models=[f"scripted/{model}"],
        model_type="text",
    )
    assert await get_in_time(client, call["b"]) == "two"
    first, second = upstream.wait_for_calls(model, 2)
    assert (first.target, second.target) == ("/v1/chat/completions", "/v1/chat/completions")
    assert second.json["messages"] == [
        {"role": "user", "content": "Say "},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": " and "},
    ]
    await client.remove()


async def test_failures_of_upstreams_reach_get(
    front: GatewayProcess, upstream: ScriptedUpstream, client: V3Client
) -> None:
    model = upstream.script(error(400))
    models = [f"scripted/{model}"]
    call = await client.call("Say {{out}}", models=models)
    after = await client.call("And {{x}}:{{out}}", {"x": call["out"]}, models=models)
    for variable in (call["out"], after["out"]):
        with pytest.raises(V3Error, match="scripted 400") as caught:
            await get_in_time(client, variable)
        assert caught.value.code == "dependency_failed"
    await client.remove()
    assert left_over(front) == {}
