"""Semantic functions on a real gateway with the demo model; the documentation's example too."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess
from parrot_functions import (
    Client,
    DeadlineError,
    DependencyFailedError,
    Input,
    Output,
    ServerError,
    Session,
    semantic_function,
)

ROOT = Path(__file__).parents[2]
GREEDY = {"max_tokens": 12, "temperature": 0}
AT_ONCE = Output(max_tokens=12, temperature=0)


@semantic_function
def tell(hero: Input, story: Output = AT_ONCE) -> None:
    """Once there was {{hero}}. One day{{story}}"""


@semantic_function
def judge(
    story: Input,
    times: int,
    praise: Output = AT_ONCE,
    wish: Output = Output(max_tokens=12, temperature=0, transform="strip | upper"),
    last: Output = AT_ONCE,
) -> None:
    """Told {{times}} times: {{story}}, {{other}}.

    The king said: {{praise}}
    The queen wished: {{wish}}
    And so{{last}}

    Nobody reads this.
    """


@pytest.fixture
def session(demo: GatewayProcess) -> Session:
    return Session(demo.base_url, api_key=demo.api_key, model=DEMO_MODEL, timeout=60)


def complete(demo: GatewayProcess, prompt: str) -> str:
    """The same as an ordinary call."""
    status, _, answer = demo.post(
        "/v1/completions", {"model": DEMO_MODEL, "prompt": prompt, **GREEDY}
    )
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def test_texts_are_those_of_calls_made_one_by_one(demo: GatewayProcess, session: Session) -> None:
    with session:
        story = tell("a {{hero}} of tales")
        praise, wish, last = judge(story, 3)
        found = [text.get() for text in (last, wish, praise, story)]
    told = complete(demo, "Once there was a {{hero}} of tales. One day")
    begins = f"Told 3 times: {told}, {{{{other}}}}.\n\nThe king said: "
    praised = complete(demo, begins)
    begins += f"{praised}\nThe queen wished: "
    wished = complete(demo, begins).strip().upper()
    ended = complete(demo, f"{begins}{wished}\nAnd so")
    assert found == [ended, wished, praised, told]


def test_nothing_is_left_of_a_session(demo: GatewayProcess, session: Session) -> None:
    with session:
        before = {s["name"] for s in demo.get("/v1/sessions")["data"]}
        text = tell("x")
        for _ in range(20):
            text = tell(text)
        assert tell("y").get()
        during = {s["name"] for s in demo.get("/v1/sessions")["data"]}
    after = {s["name"] for s in demo.get("/v1/sessions")["data"]}
    assert session.name in during - before
    assert session.name not in after
    demo.wait_idle()


async def test_asynchronous_programs(demo: GatewayProcess, session: Session) -> None:
    async with session:
        stories = [tell(hero) for hero in ("a fox", "a hen", "a cat")]
        assert len(set(await asyncio.gather(*stories))) == 3
        told = await tell(stories[0])
    assert told == complete(demo, f"Once there was {stories[0]}. One day")


def test_programs_share_a_session_by_its_name(demo: GatewayProcess) -> None:
    with Client(demo.base_url, api_key=demo.api_key, model=DEMO_MODEL, timeout=60) as client:
        with Session(client=client, name="shared") as one:
            # Read before anything is written.
            story = tell(one.variable("hero"))
            name = story.only.name
        with Session(client=client, name="shared") as other:
            with pytest.raises(DeadlineError):
                other.variable(name).get(timeout=0.05)
            other.variable("hero", "a goose")
            expected = complete(demo, "Once there was a goose. One day")
            assert other.variable(name).get() == expected
        with Session(client=client) as third, Session(client=client, name="shared") as other:
            mine = third.variable("mine", "a duck")
            assert other.call(tell, mine).get() == complete(demo, "Once there was a duck. One day")


def test_refused_calls(session: Session) -> None:
    with session:
        lost = semantic_function(model="no-such-model")(_tale)("a fox")
        behind = tell(tell(lost))
        with pytest.raises(ServerError) as refused:
            lost.get()
        with pytest.raises(DependencyFailedError) as failed:
            behind.get()
    assert refused.value.code == "model_not_found"
    assert "no-such-model" in refused.value.message
    assert refused.value.request_id is not None
    assert failed.value.__cause__ is not None
    assert failed.value.__cause__.__cause__ is refused.value


def test_calls_that_fail_while_they_run(session: Session) -> None:
    with session:
        broken = semantic_function(_no_json)("a fox")
        behind = tell(tell(broken))
        with pytest.raises(DependencyFailedError) as failed:
            behind.get()
    story: dict[str, Any] | None = failed.value.failure
    codes = []
    while story is not None:
        codes.append(story["code"])
        story = story["cause"]
    assert codes[-1] == "transform_failed"


def test_bad_transforms_are_refused_at_once(session: Session) -> None:
    with session, pytest.raises(ServerError) as refused:
        semantic_function(_no_transform)("a fox").get()
    assert refused.value.code == "transform_syntax"


def test_the_quickstart(demo: GatewayProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", demo.api_key or "")
    program = runpy.run_path(str(ROOT / "examples" / "functions_quickstart.py"))
    texts = program["main"](demo.base_url)
    assert list(texts) == ["task", "story", "praise", "wish"]
    assert all(text.strip() for text in texts.values())


def _tale(hero: Input, story: Output = AT_ONCE) -> None:
    """A tale of {{hero}}: {{story}}"""


def _no_json(hero: Input, story: Output = Output(max_tokens=5, transform="json(/a)")) -> None:
    """A tale of {{hero}}: {{story}}"""


def _no_transform(hero: Input, story: Output = Output(transform="jsn(")) -> None:
    """A tale of {{hero}}: {{story}}"""
