"""Schemas with string formats that pydantic writes: every answer is valid, also of the demo model,
which would go on with digits and letters as long as it may."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import openai
import pytest
from harness.processes import DEADLINE_S, DEMO_MODEL, GatewayProcess
from pydantic import UUID4, Base64Bytes, BaseModel, SecretStr, create_model

ASK: Any = [{"role": "user", "content": "Once upon a time"}]
SEEDS = range(4)


def client_of(demo: GatewayProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=demo.base_url, api_key=demo.api_key, max_retries=0, timeout=DEADLINE_S
    )


@pytest.mark.parametrize(
    "kind", [datetime.datetime, datetime.date, datetime.time, datetime.timedelta, UUID4]
)
def test_known_formats_are_valid(demo: GatewayProcess, kind: type) -> None:
    model: type[BaseModel] = create_model("Made", value=(kind, ...))
    with client_of(demo) as client:
        for seed in SEEDS:
            # Raises unless it ended by itself and is valid.
            answer = client.chat.completions.parse(
                model=DEMO_MODEL, messages=ASK, response_format=model, seed=seed, max_tokens=120
            )
            assert answer.choices[0].finish_reason == "stop"
            assert isinstance(answer.choices[0].message.parsed, model)


@pytest.mark.parametrize(
    ("kind", "name"), [(Path, "path"), (SecretStr, "password"), (Base64Bytes, "base64")]
)
def test_unknown_formats_are_ignored_and_named(demo: GatewayProcess, kind: type, name: str) -> None:
    schema = create_model("Made", value=(kind, ...)).model_json_schema()
    named = {"name": "made", "schema": schema}
    asked: Any = {"model": DEMO_MODEL, "messages": ASK, "max_tokens": 60}
    tool: Any = {"name": "made", "parameters": schema, "strict": True}
    with client_of(demo) as client:
        raw = client.chat.completions.with_raw_response
        answers = [
            raw.create(response_format={"type": "json_schema", "json_schema": named}, **asked),  # type: ignore[typeddict-item]
            raw.create(tools=[{"type": "function", "function": tool}], **asked),
            client.responses.with_raw_response.create(
                model=DEMO_MODEL,
                input="Once upon a time",
                text={"format": {"type": "json_schema", **named}},  # type: ignore[typeddict-item]
                max_output_tokens=60,
            ),
            client.completions.with_raw_response.create(
                model=DEMO_MODEL, prompt="Once", max_tokens=60, extra_body={"guided_json": schema}
            ),
        ]
    for answer in answers:
        assert answer.headers["x-parrot-ignored"] == f"format:{name}"


@pytest.mark.parametrize("pattern", [r"^P\d+D$", r"^[a-z.]+Z\.$", r"^\w+@\w+!$", "^[A-Z0-9]+-x$"])
def test_a_pattern_without_a_bound_is_closed_near_max_tokens(
    demo: GatewayProcess, pattern: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"value": {"type": "string", "pattern": pattern}},
        "required": ["value"],
    }
    model = create_model("Made", value=(str, ...))
    with client_of(demo) as client:
        for seed in SEEDS:
            answer = client.chat.completions.create(
                model=DEMO_MODEL,
                messages=ASK,
                seed=seed,
                max_tokens=100,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "made", "schema": schema},
                },
            )
            (choice,) = answer.choices
            assert choice.finish_reason == "stop"
            model.model_validate_json(choice.message.content or "")
