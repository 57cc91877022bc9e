"""Share of structured calls that finish with a valid document.

    python tools/structured_output.py --url http://127.0.0.1:8000 [--schemas FOLDER] [--count 100]

Calls a running gateway with the schemas of pydantic models, and as instructor and LangChain send
them where these are installed; with `--schemas` also with `--count` files of a folder, drawn
evenly: JSON documents that are a schema or have one at `schema` (JSONSchemaBench's). Each schema
once greedily and once with temperature 1. A call finishes if its `finish_reason` says that the
answer is whole and the document conforms to the schema, as the jsonschema package reads it.
"""

from __future__ import annotations

import argparse
import json
import random
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jsonschema
from pydantic import BaseModel, Field


class Mood(Enum):
    GLAD = "glad"
    SAD = "sad"


class Address(BaseModel):
    street: str
    city: str
    zip: str | None = None


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int
    mood: Mood
    addresses: list[Address]


class Event(BaseModel):
    """What goes into a calendar."""

    title: str
    day: date
    starts: datetime | None = None
    participants: list[str]


class Node(BaseModel):
    """A tree."""

    label: str
    children: list[Node] = []


class Step(BaseModel):
    explanation: str
    output: str


class Reasoning(BaseModel):
    """The steps to an answer."""

    steps: list[Step]
    final_answer: str


class Search(BaseModel):
    """Search for something."""

    query: str = Field(description="what to look for")
    limit: int = 10
    filters: dict[str, str] = {}


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[str]


class Pet(BaseModel):
    """A pet."""

    name: str
    animal: Cat | Dog = Field(discriminator="kind")
    weight: float = Field(gt=0)


class Joke(BaseModel):
    """A joke to tell."""

    setup: str = Field(description="the question")
    punchline: str = Field(description="the answer")
    rating: int | None = Field(default=None, description="from 1 to 10")


MODELS = [Person, Event, Node, Reasoning, Search, Pet, Joke]
GREEDY_OR_SAMPLED = ((0.0, "greedy"), (1.0, "sampled"))


class Call(NamedTuple):
    source: str
    schema: dict[str, Any]
    fields: dict[str, Any]


def _format(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    choice = {"type": "function", "function": {"name": tool["function"]["name"]}}
    return {"tools": [tool], "tool_choice": choice}


def calls(folder: Path | None, count: int) -> Iterator[Call]:
    """All calls, once each."""
    for model in MODELS:
        schema = model.model_json_schema()
        yield Call("pydantic, response_format", schema, _format(model.__name__, schema))
    try:
        from instructor import openai_schema
    except ImportError:
        pass
    else:
        for model in MODELS:
            function = openai_schema(model).openai_schema
            tool = {"type": "function", "function": function}
            yield Call("instructor, tools", function["parameters"], _tool(tool))
    try:
        from langchain_core.utils.function_calling import convert_to_openai_tool
    except ImportError:
        pass
    else:
        for model in MODELS:
            tool = convert_to_openai_tool(model)
            yield Call("LangChain, tools", tool["function"]["parameters"], _tool(tool))
    if folder is None:
        return
    files = sorted(folder.rglob("*.json"))
    for file in random.Random(0).sample(files, min(count, len(files))):  # noqa: S311 -- a sample
        document = json.loads(file.read_text())
        schema = document["schema"] if "tests" in document else document
        yield Call("files, response_format", schema, _format("x", schema))


def outcome(url: str, model: str, max_tokens: int, call: Call, temperature: float) -> str:
    """How a call ends: finished, length, refused or invalid."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Fill in the form."}],
        "temperature": temperature,
        "seed": 1,
        "max_tokens": max_tokens,
        **call.fields,
    }
    request = urllib.request.Request(  # noqa: S310 -- the user's own address
        f"{url.rstrip('/')}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
            choice = json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        return "refused" if error.code == 400 else f"status {error.code}"
    if choice["finish_reason"] == "length":
        return "length"
    message = choice["message"]
    tool_calls = message.get("tool_calls")
    text = tool_calls[0]["function"]["arguments"] if tool_calls else message["content"]
    try:
        jsonschema.validate(json.loads(text), call.schema)
    except (ValueError, jsonschema.ValidationError):
        return "invalid"
    except Exception:
        return "schema unreadable"
    return "finished"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="parrot-demo")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--schemas", type=Path)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    jobs = [
        (call, temperature, name)
        for call in calls(options.schemas, options.count)
        for temperature, name in GREEDY_OR_SAMPLED
    ]
    with ThreadPoolExecutor(16) as threads:
        ended = list(
            threads.map(
                lambda job: outcome(options.url, options.model, options.max_tokens, *job[:2]), jobs
            )
        )
    table: dict[tuple[str, str], Counter[str]] = {}
    for (call, _, name), how in zip(jobs, ended, strict=True):
        table.setdefault((call.source, name), Counter())[how] += 1
    for (source, name), counter in table.items():
        others = ", ".join(f"{how} {n}" for how, n in counter.items() if how != "finished")
        print(f"| {source} | {name} | {counter['finished']} of {counter.total()} | {others} |")


if __name__ == "__main__":
    main()
