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
from parrot_gateway.linking.profiles.profiles import Profile, TenantProfiles, output_tokens
from parrot_gateway.linking.profiles.templates import Template, template_of

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
        ({"choices": [{"message": {"content": "x" * 7, "tool_calls": [
            {"id": "t", "function": {"name": "look", "arguments": "y" * 5}}]}}]}, 12 / 4),
        ({"output": [], "usage": {"output_tokens": 5, "x": {"output_tokens": "no"}}}, 5.0),
        ({"output": [], "usage": {"output_tokens": 5}, "later": {"output_tokens": 6}}, 6.0),
        ({"content": [{"type": "text", "text": "x" * 9000}], "usage": {"n": 1}}, 9000 / 4),
    ],
)  # fmt: skip
def test_tokens_of_an_answer(answer: dict[str, Any], tokens: float) -> None:
    body = msgspec.json.encode({"id": "answer", **answer})
    known = answer_of(CHAT, body)
    assert known is not None
    assert output_tokens(body, known) == tokens


def template(text: str) -> Template:
    return template_of(b'"messages":[{"role":"user","content":"' + text.encode())


def test_a_forecast_is_made_of_the_counts_of_a_profile() -> None:
    profile = Profile(
        template("Hi"), calls=16.0, returned=8.0, in_fan_in=4.0, fan_in=12.0, siblings=8.0,
        successors={"rare": (2.0, 2.0), "usual": (12.0, 24.0), "gone": (0.0, 0.0)}, is_outer=True,
    )  # fmt: skip
    for _ in range(10):
        profile.lengths.add(100.0)
        profile.gaps.add(2000.0)
    told = profile.forecast()
    assert 100 <= told.output_tokens[0] <= told.output_tokens[1] <= 120
    assert 2.0 <= told.gap_s[0] <= told.gap_s[1] <= 2.4
    assert profile.unused_s == max(4 * told.gap_s[1], 10.0)
    plain = msgspec.structs.replace(told, output_tokens=(0.0, 0.0), gap_s=(0.0, 0.0))
    assert plain == Forecast(
        profile.template.key, 10.0, (0.0, 0.0), 4 / 16, 12 / 4, 8 / 4, 8 / 16, (0.0, 0.0),
        (("usual", 12 / 16, 2.0), ("rare", 2 / 16, 1.0)), 16.0, True, profile.template.length,
    )  # fmt: skip
    # Nothing is known; more than all is all.
    assert Profile(template("Hi")).forecast() == Forecast(
        profile.template.key, 0.0, prefix_bytes=profile.template.length
    )
    most = Profile(template("Hi"), returned=2.0, in_fan_in=3.0, successors={"a": (5.0, 5.0)})
    told = most.forecast()
    assert (told.returns, told.feeds_fan_in, told.successors) == (1.0, 1.0, (("a", 1.0, 1.0),))


def test_all_counts_of_a_profile_fade_together() -> None:
    profile = Profile(
        template("Hi"), calls=255.0, returned=100.0, in_fan_in=80.0, fan_in=60.0, siblings=40.0,
        successors={"many": (9.0, 12.0), "few": (0.25, 0.25)},
    )  # fmt: skip
    profile.settle()
    assert (profile.calls, profile.returned, profile.siblings) == (256.0, 100.0, 40.0)
    profile.settle()
    counts = (profile.calls, profile.returned, profile.in_fan_in, profile.fan_in, profile.siblings)
    assert counts == (128.5, 50.0, 40.0, 30.0, 20.0)
    assert profile.successors == {"many": (4.5, 6.0)}
    for number in range(15):
        profile.succeed(f"new {number}", True)
    profile.succeed("new 3", False)
    profile.succeed("one too many", True)
    assert len(profile.successors) == 16
    # The rarest makes room.
    assert "new 0" not in profile.successors
    assert profile.successors["new 3"] == (1.0, 2.0)
    assert profile.successors["one too many"] == (1.0, 1.0)


def test_a_tenant_restores_no_more_profiles_than_it_may_have() -> None:
    profiles = TenantProfiles(2)
    for text in ("a", "b", "c"):
        profiles.restore(Profile(template(text)))
    assert len(profiles) == 2
    assert [each.template for each in profiles.profiles()] == [template("a"), template("b")]
    told, removed = profiles.changes(1)
    assert ([each.template for each in told], removed) == ([template("a")], [])
    assert profiles.has_changed
    assert profiles.changes(5)[0][0].template == template("b")
    assert not profiles.has_changed
    # They are found in prompts at once, the used one stays longer.
    body = b'{"messages":[{"role":"user","content":"%s"}]}'
    session = LinkedSession("s", 0.0, False)
    profiles.request("c1", body % b"a first", [], session, 1.0)
    assert profiles.template_of("c1") == template("a").key
    assert profiles.template_of("c2") == ""
    assert [each.template for each in profiles.profiles()] == [template("b"), template("a")]
    before = profiles.size_bytes
    profiles.answer("c1", 9.0, 2.0)
    profiles.answer("c1", 99.0, 3.0)
    (told_one,) = profiles.changes(5)[0]
    assert told_one.forecast.weight == 1.0
    profiles.drop("c1")
    assert (profiles.template_of("c1"), profiles.size_bytes) == ("", before - 400)
    # Nobody used it, but it failed: it is not counted.
    profiles.request("c3", body % b"a second", [], session, 500.0)
    assert next(reversed([*profiles.profiles()])).calls == 0
    profiles.answer("c3", 9.0, 501.0)
    profiles.request("c4", body % b"b third", [], session, 560.9)
    assert profiles.changes(5)[0][0].forecast.settled == 0
    profiles.request("c5", body % b"b third", [], session, 561.0)
    assert profiles.changes(5)[0][0].forecast.settled == 1


@pytest.mark.parametrize(("kind", "count"), [("continues", 0), ("tool", 0), ("output", 1)])
def test_only_prompts_that_begin_something_make_templates(kind: LinkKind, count: int) -> None:
    client = Client()
    for number in range(40):
        source = f"other-{number}"
        client.ask("agent", source, kind=kind)
        client.now += 2.0
    assert len(client.profiles) == count
