"""Profiles of templates are learned from links and answers."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import msgspec
import pytest

from parrot_gateway.linking.linker.conversation import answer_of
from parrot_gateway.linking.linker.links import Link, LinkedSession, LinkKind
from parrot_gateway.linking.profiles.forecast import Forecast, Forecasts
from parrot_gateway.linking.profiles.profiles import TenantProfiles, output_tokens

CHAT = "/v1/chat/completions"
#: Instructions of the roles, by name.
ROLES = {
    "map": "Summarise this part of a long document in two sentences:\n\n",
    "reduce": "Here are summaries of all parts. Join them to one text:\n\n",
    "agent": "Answer the question of a person, and use tools where you must:\n\n",
    "title": "Give what follows a title of at most five words, no more:\n\n",
}


class Client:
    """Sends the calls of applications to the profiles of one tenant, on a clock of its own."""

    def __init__(self, max_templates: int = 100, seed: int = 0) -> None:
        self.profiles = TenantProfiles(max_templates)
        self.now = 0.0
        self._forecasts = Forecasts()
        self._draw = random.Random(seed)
        self._ids = count()

    def body(self, role: str) -> bytes:
        words = [self._draw.choice("abcdefghij") * self._draw.randint(2, 9) for _ in range(30)]
        message = {"role": "user", "content": ROLES[role] + " ".join(words)}
        return msgspec.json.encode({"model": "model", "messages": [message]})

    def send(self, role: str, *sources: str, kind: LinkKind = "output") -> str:
        """A call that begins now, in a session of its own."""
        call = f"call-{next(self._ids)}"
        links = [Link(source, kind, 1.0) for source in sources]
        session = LinkedSession(call, self.now, False)
        self.profiles.request(call, self.body(role), links, session, self.now)
        return call

    def ask(self, role: str, *sources: str, kind: LinkKind = "output", tokens: float = 50) -> str:
        """A call that takes 1 s."""
        call = self.send(role, *sources, kind=kind)
        self.now += 1.0
        self.profiles.answer(call, tokens, self.now)
        return call

    def map_reduce(self, parts: int = 5) -> None:
        """Parts at once, their join 2 s later, its title 1 s after that."""
        calls = [self.send("map") for _ in range(parts)]
        self.now += 3.0
        for call in calls:
            self.profiles.answer(call, 80, self.now)
        self.now += 2.0
        joined = self.ask("reduce", *calls, tokens=300)
        self.now += 1.0
        self.ask("title", joined, tokens=5)
        self.now += 10.0

    def tell(self) -> None:
        """The gateway learns what has changed, as it does every second."""
        changed, removed = self.profiles.changes(1000)
        self._forecasts.update("tenant", changed, removed)

    def forecast(self, role: str) -> Forecast:
        self.tell()
        found = self._forecasts.of("tenant", self.body(role))
        assert found is not None
        return found


def test_a_map_feeds_a_fan_in_and_the_join_its_title() -> None:
    client = Client()
    for _ in range(40):
        client.map_reduce()
    changed, _ = client.profiles.changes(1000)
    forecasts = Forecasts()
    forecasts.update("tenant", changed)
    part, join, title = (forecasts.of("tenant", client.body(r)) for r in ("map", "reduce", "title"))
    assert part is not None
    assert join is not None
    assert title is not None
    assert part.feeds_fan_in > 0.95
    assert part.fan_in == pytest.approx(5)
    assert part.siblings == pytest.approx(5)
    assert join.feeds_fan_in == title.feeds_fan_in == 0
    assert part.successors[0] == (join.template, pytest.approx(1, abs=0.2), pytest.approx(1))
    assert join.successors[0][0] == title.template
    assert title.successors == ()
    # Quantiles are the upper ends of bins, of which 4 double.
    assert 80 <= part.output_tokens[0] <= 80 * 1.2
    assert 5 <= title.output_tokens[1] <= 5 * 1.2
    assert 2 <= part.gap_s[0] <= 2 * 1.2
    assert 1 <= join.gap_s[1] <= 1 * 1.2


def test_an_answer_that_two_joins_read_feeds_a_fan_in_once() -> None:
    client = Client()
    for _ in range(30):
        calls = [client.send("map") for _ in range(4)]
        client.now += 1.0
        for call in calls:
            client.profiles.answer(call, 80, client.now)
        for _ in range(2):
            client.ask("reduce", *calls[:2])
        client.now += 100.0
    client.send("map")
    part = client.forecast("map")
    assert part.feeds_fan_in == pytest.approx(0.5, abs=0.05)
    assert part.fan_in == pytest.approx(2)


def test_calls_in_turn_feed_no_fan_in() -> None:
    client = Client()
    for _ in range(30):
        first, second = client.ask("map"), client.ask("map")
        client.ask("reduce", first, second)
        client.now += 5.0
    assert client.forecast("map").feeds_fan_in == 0


def test_an_agent_returns_after_its_tools() -> None:
    client = Client()
    for _ in range(40):
        call = client.ask("agent")
        for _ in range(4):
            client.now += 7.0
            call = client.ask("agent", call, kind="tool")
        # Long enough that the last answer counts as unused.
        client.now += 400.0
    agent = client.forecast("agent")
    assert agent.returns == pytest.approx(0.8, abs=0.05)
    assert 7 <= agent.gap_s[0] <= 7 * 1.2
    assert agent.successors[0][0] == agent.template


def test_an_answer_that_is_continued_twice_returns_once() -> None:
    client = Client()
    for _ in range(40):
        call = client.ask("agent")
        for _ in range(2):
            client.ask("title", call, kind="continues")
        client.ask("agent")
        client.now += 400.0
    client.send("title")
    assert client.forecast("agent").returns == pytest.approx(0.5, abs=0.05)


def test_few_gaps_do_not_tell_when_an_answer_is_unused() -> None:
    client = Client()
    for number in range(20):
        call = client.ask("agent")
        if number > 16:
            client.now += 0.5
            client.ask("title", call)
        client.now += 400.0
        client.tell()
    client.send("title")
    before = client.forecast("agent").settled
    client.ask("agent")
    for wait_s, is_settled in ((50.0, False), (11.0, True)):
        client.now += wait_s
        client.send("title")
        assert client.forecast("agent").settled - before == is_settled


def test_failed_calls_teach_nothing_of_lengths() -> None:
    client = Client()
    for _ in range(20):
        client.ask("title", tokens=5)
        client.now += 1.0
    before = client.forecast("title").weight
    client.profiles.drop(client.send("title"))
    client.ask("title")
    assert client.forecast("title").weight == before + 1


def test_what_is_known_of_old_calls_fades() -> None:
    client = Client()
    for _ in range(300):
        client.ask("title", tokens=1000)
    for _ in range(600):
        client.ask("title", tokens=10)
    assert client.forecast("title").output_tokens[0] < 15


def test_shares_and_groups_stay_right_as_old_calls_fade() -> None:
    client = Client()
    for parts in (8, 3):
        for _ in range(900 // parts):
            client.map_reduce(parts)
        part = client.forecast("map")
        assert part.settled <= 256
        assert part.feeds_fan_in == pytest.approx(1, abs=0.02)
        assert part.fan_in == part.siblings == pytest.approx(parts, rel=0.15)
        assert part.successors[0][1:] == (pytest.approx(1, abs=0.02), pytest.approx(1))


def test_answers_that_returned_fade_with_the_others() -> None:
    client = Client()
    for _ in range(300):
        client.now += 1.0
        client.ask("agent", client.ask("agent"), kind="continues")
    for _ in range(1200):
        client.ask("agent")
        client.now += 400.0
    assert client.forecast("agent").returns < 0.05


@pytest.mark.parametrize(
    ("gap_s", "unused_s"),
    # Four times the long gaps, but at least ten seconds.
    [(0.5, (9, 11)), (9.0, (35, 44)), (50.0, (199, 241))],
)
def test_an_answer_counts_as_unused_as_late_as_its_gaps_say(
    gap_s: float, unused_s: tuple[float, float]
) -> None:
    for wait_s, is_settled in zip(unused_s, (False, True), strict=True):
        client = Client()
        for _ in range(40):
            call = client.ask("agent")
            client.now += gap_s
            client.ask("title", call)
            client.now += 400.0
            client.tell()
        client.send("title")
        before = client.forecast("agent").settled
        client.ask("agent")
        client.now += wait_s
        client.send("title")
        assert client.forecast("agent").settled - before == is_settled


def test_templates_used_longest_ago_make_room() -> None:
    client = Client(max_templates=2)
    for role in ROLES:
        for _ in range(20):
            client.ask(role)
            client.now += 1.0
    assert len(client.profiles) == 2
    changed, removed = client.profiles.changes(1000)
    assert len(changed) == 2
    assert not {each.template.key for each in changed} & set(removed)


def test_a_large_change_comes_in_parts() -> None:
    client = Client()
    for role in ROLES:
        for _ in range(20):
            client.ask(role)
            client.now += 1.0
    known = len(client.profiles)
    parts = 0
    while client.profiles.has_changed:
        assert len(client.profiles.changes(1)[0]) <= 1
        parts += 1
    assert parts >= known


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ({"choices": [{"message": {"content": "x" * 40}}]}, 10.0),
        ({"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": 7}}, 7.0),
        ({"choices": [{"message": {"content": "x"}}, {"message": {"content": "y"}}],
          "usage": {"completion_tokens": 8}}, 4.0),
        ({"usage": {"output_tokens": 3}, "content": [{"type": "text", "text": "x" * 9000}]}, 3.0),
        ({"choices": [{"message": {"content": '"completion_tokens": 9'}}]}, 22 / 4),
    ],
)  # fmt: skip
def test_tokens_of_an_answer(answer: dict[str, Any], tokens: float) -> None:
    body = msgspec.json.encode({"id": "answer", **answer})
    known = answer_of(CHAT, body)
    assert known is not None
    assert output_tokens(body, known) == tokens
