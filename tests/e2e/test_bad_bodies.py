"""Hundreds of broken bodies against the real process: each gets a 4xx in OpenAI's shape."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from harness.processes import DEMO_MODEL, GatewayProcess
from harness.raw_http import RawConnection, check_error

COMPLETION: dict[str, Any] = {
    "model": DEMO_MODEL,
    "prompt": "Once",
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": 1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "logit_bias": {"5": 1},
    "seed": 1,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "u",
    "min_p": 0.1,
    "top_k": 5,
    "repetition_penalty": 1.1,
    "min_tokens": 0,
    "ignore_eos": True,
    "stop_token_ids": [3],
}
CHAT: dict[str, Any] = {
    **{name: value for name, value in COMPLETION.items() if name not in
       ("prompt", "best_of", "echo", "max_tokens")},
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
    ],
    "max_completion_tokens": 2,
    "logprobs": True,
    "top_logprobs": 1,
    "metadata": {"a": "b"},
}  # fmt: skip

#: Values that no field takes.
STRANGE: list[Any] = [{"a": {"b": []}}, [[[[]]]], [{"type": 5}], [None], {"": None}, [1.5], [True]]
#: Values that a field of this type does not take.
WRONG: dict[type, list[Any]] = {
    bool: ["true", 1, 0.5, [], "no"],
    int: ["1", 1.5, True, [], {}, -(10**30), 10**400, 2**63, "∞"],
    float: ["0.5", True, [], {}, 1e30, -1e30, 10**400, "NaN"],
    str: [5, True, 1.5, {}],
    list: [5, {"a": 1}, True, [[]], [{}], [5.5]],
    dict: ["x", 5, [], True],
}
#: Numbers outside what a field allows.
RANGES: dict[str, list[Any]] = {
    "temperature": [-0.01, 2.01, 1e300],
    "top_p": [-0.01, 1.01],
    "n": [0, -1, 129, 10**6],
    "best_of": [-1, 21],
    "frequency_penalty": [-2.01, 2.01],
    "presence_penalty": [-2.01, 2.01],
    "max_tokens": [-1, 10**9, 2**62],
    "max_completion_tokens": [0, -1, 10**9, 2**62],
    "top_logprobs": [-1, 21],
    "logit_bias": [{"x": 1}, {"5": 101}, {"5": -101}, {"-1": 0}, {"999999999": 1}, {"5": "a"},
                   {"1" * 5000: 1}, {"٥": 1}],
    "stop": [["a"] * 5, [""] * 5, 5],
    "min_p": [-0.1, 1.1],
    "top_k": [-2],
    "repetition_penalty": [0, -1],
    "min_tokens": [-1, 1000],
    "stop_token_ids": [[-1], [10**9], ["x"]],
    "seed": [2**63, -(2**63) - 1],
    "model": ["", "nothing", "\u0000", "parrot-demo ", "x" * 100_000, "𝕏" * 50],
    "prompt": [[], [[]], [-1], [10**9], [[1], [-5]], [1, "a"], ["a", 1], [["a"]]],
    "messages": [[], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": "", "content": "x"}],
                 [{"role": "tool", "content": "x"}], [{"role": "user", "content": []}],
                 [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                 [{"role": "user", "content": None}], ["x"], "x",
                 [{"role": "user", "content": [{"type": "text"}]}]],
    "stream_options": [{"include_usage": "yes"}, {"include_usage": 1}],
    "metadata": [{str(i): "x" for i in range(17)}],
}  # fmt: skip


def _nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


#: Objects in which any key may stand.
OPEN_OBJECTS = ("metadata", "stream_options")
#: Without these an endless answer could be right.
KEPT = ("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream")


def _mutate(choose: random.Random) -> tuple[str, bytes]:
    """A path, and a body that is certainly wrong."""
    path, valid = choose.choice([("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
    body = copy.deepcopy(valid)
    field = choose.choice(sorted(set(body) - {"user"}))
    strange = [
        value for value in STRANGE if field not in OPEN_OBJECTS or not isinstance(value, dict)
    ]
    kinds = [WRONG[type(body[field])], strange, [_nested(depth) for depth in (3, 40, 400)]]
    kinds += [RANGES[field]] * 3 if field in RANGES else []
    body[field] = choose.choice(choose.choice(kinds))
    for other in choose.sample(sorted(set(body) - {field, *KEPT}), 4):
        del body[other]
    encoded = json.dumps(body, ensure_ascii=choose.random() < 0.5).encode()
    damage = choose.random()
    if damage < 0.1:
        encoded = encoded[: choose.randrange(len(encoded))]
    elif damage < 0.2:
        at = choose.randrange(len(encoded))
        encoded = encoded[:at] + bytes([choose.choice([0, 1, 0x1F])]) + encoded[at:]
    return path, encoded


def test_five_hundred_broken_bodies(demo: GatewayProcess) -> None:
    choose = random.Random(20241104)
    wrong: list[str] = []
    with RawConnection(demo.port, api_key=demo.api_key) as connection:
        for number in range(500):
            path, body = _mutate(choose)
            response = connection.ask("POST", path, body)
            try:
                assert 400 <= response.status < 500
                check_error(response, response.status)
            except AssertionError:
                wrong.append(f"{number}: {path} {body[:300]!r} -> {response.status} "
                             f"{response.body[:300]!r}")  # fmt: skip
        answer = connection.ask(
            "POST", "/v1/completions", {"model": DEMO_MODEL, "prompt": "Once", "max_tokens": 2}
        )
    assert not wrong, "\n".join(wrong)
    assert answer.status == 200
    assert "Traceback" not in demo.stderr()


def test_the_unbroken_bodies_are_answered(demo: GatewayProcess) -> None:
    with RawConnection(demo.port, api_key=demo.api_key) as connection:
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            assert connection.ask("POST", path, body).events[-1] == "[DONE]"
