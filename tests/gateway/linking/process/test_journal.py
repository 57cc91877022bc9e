"""The journal of linked calls, for questions about them."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from parrot_gateway.linking.process.journal import MAX_LISTED, LinkJournal
from parrot_gateway.linking.process.wire import AnswerSeen, RequestSeen
from parrot_gateway.linking.process.worker_process import limits_of
from parrot_gateway.linking.profiles.profile_store import ProfileStore
from parrot_gateway.settings.model import LinkingSettings

PATH = "/v1/chat/completions"


class Play:
    """Hands calls to a journal, a second apart."""

    def __init__(self, **settings: int) -> None:
        chosen = LinkingSettings(**settings)
        profiles = ProfileStore(chosen.max_tenants, chosen.max_templates)
        self.journal = LinkJournal(limits_of(chosen), chosen.max_tenants, profiles)
        self.now = 0.0

    def start(self, call: str, text: str, tenant: str = "t", session: str = "") -> None:
        self.now += 1.0
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
        self.send(call, body, tenant, session)

    def send(self, call: str, body: bytes, tenant: str = "t", session: str = "") -> None:
        self.journal.request(
            RequestSeen(tenant, call, f"req-{call}", PATH, session, self.now, body)
        )

    def end(self, call: str, id: str = "", tenant: str = "t", **message: Any) -> None:
        body = {"id": id, "choices": [{"message": {"role": "assistant", **message}}]}
        self.finish(call, 200, json.dumps(body).encode(), tenant)

    def finish(self, call: str, status: int, body: bytes, tenant: str = "t") -> None:
        self.now += 1.0
        self.journal.answer(AnswerSeen(tenant, call, status, self.now, body))

    def call(self, name: str, tenant: str = "t") -> dict[str, Any]:
        found = self.journal.describe_call(tenant, name)
        assert found is not None
        return found


def test_the_newest_call_of_an_id_keeps_it_when_older_ones_go() -> None:
    play = Play(max_calls=3)
    for number in range(6):
        play.start(f"c{number}", f"Question {number}?")
        play.end(f"c{number}", "always-the-same", content="Yes.")
        assert play.call("always-the-same")["id"] == f"c{number}"
    assert play.journal.describe_call("t", "c1") is None
    assert play.journal.describe_call("t", "req-c1") is None
    assert play.call("req-c4")["id"] == "c4"


def test_a_call_is_found_by_its_own_id_whatever_responses_are_called() -> None:
    play = Play()
    for call in ("c1", "c2"):
        play.start(call, f"Question of {call}?")
    play.end("c2", "c1", content="Yes.")
    assert play.call("c1")["id"] == "c1"


def test_errors_are_shown_and_unanswered_calls_are_cancelled() -> None:
    play = Play()
    for call, status in (("c1", 503), ("c2", 0), ("c3", 200)):
        play.start(call, f"Question of {call}?")
        play.finish(call, status, b"")
    states = [(play.call(call)["state"], play.call(call)["error"]) for call in ("c1", "c2", "c3")]
    assert states == [("failed", 503), ("cancelled", None), ("done", None)]


def test_names_of_tools_are_kept_and_no_arguments() -> None:
    play = Play()
    play.start("c1", "How is Paris?")
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    play.end("c1", "r1", content=None, tool_calls=[{"id": "x", "function": function}] * 2)
    assert play.call("r1")["tools"] == ["get_weather"]
    assert "Paris" not in json.dumps(play.call("r1"))


def test_requests_that_cannot_be_read_are_known_and_counted() -> None:
    play = Play()
    play.send("c1", b"\xff{")
    play.finish("c1", 200, b'{"id": "r1", "choices": [')
    assert play.call("r1")["links"] == []
    assert play.journal.statistics()["unreadable"] == 1
    assert play.journal.statistics()["linked"] == 1


def test_sessions_are_bounded_as_calls_are() -> None:
    play = Play(max_calls=5)
    for number in range(12):
        play.start(f"c{number}", f"Question {number}?", session=f"s{number}")
    assert play.journal.describe_session("t", "s0") is None
    assert play.journal.describe_session("t", "s11") is not None
    assert play.journal.statistics()["calls"] == 5


def test_questions_make_no_tenants() -> None:
    play = Play(max_tenants=1)
    play.start("c1", "Question?")
    for number in range(3):
        assert play.journal.describe_call(f"t{number}", "c1") is None
        assert play.journal.describe_sessions(f"t{number}")["data"] == []
    assert play.journal.statistics()["tenants"] == 1
    before = play.journal.profiles.known("t")
    assert play.journal.describe_profiles("other") == {"object": "list", "data": []}
    assert before is not None
    assert play.journal.profiles.known("t") is before
    assert play.call("c1")["id"] == "c1"


def test_calls_of_merged_sessions_are_in_order() -> None:
    play = Play()
    texts = [" ".join(f"word{number}x{index}" for index in range(30)) for number in range(3)]
    for number, text in enumerate(texts):
        play.start(f"c{number}", f"Question {number}?")
        play.end(f"c{number}", content=text)
    play.start("all", "\n\n".join(reversed(texts)))
    graph = play.journal.describe_graph("t", play.call("all")["session"])
    assert graph is not None
    assert [call["id"] for call in graph["calls"]] == ["c0", "c1", "c2", "all"]
    summary = play.journal.describe_session("t", graph["session"])
    assert summary is not None
    assert (summary["models"], summary["calls"]) == (["m"], {"unfinished": 1, "finished": 3})


def test_one_who_watches_is_told_of_all_sessions_and_then_of_changes() -> None:
    play = Play()
    for number in range(120):
        play.start(f"c{number}", f"Question {number}?")
        play.end(f"c{number}", content=f"Answer {number}.")
    assert not play.journal.has_changed
    first, *others = play.journal.watch(True)
    assert (first.is_first, first.is_whole, first.calls) == (True, False, [])
    assert [each.is_whole for each in others] == [False, True]
    told = [each for changes in (first, *others) for each in changes.sessions]
    assert [each.joined for each in told] == [[f"c{number}"] for number in range(120)]
    assert not play.journal.has_changed
    play.start("new", "Another one?")
    play.finish("new", 500, b"{}")
    assert play.journal.has_changed
    changes = play.journal.changes()
    (session,), (call,) = changes.sessions, changes.calls
    assert (call["id"], call["state"], call["session"]) == ("new", "failed", session.id)
    assert (session.joined, session.calls, session.unfinished, session.failed) == (["new"], 1, 0, 1)
    assert not play.journal.has_changed
    assert list(play.journal.watch(False)) == []
    play.start("unseen", "Who sees this?")
    assert not play.journal.has_changed


def test_one_who_watches_is_told_of_merged_sessions() -> None:
    play = Play()
    assert [each.is_whole for each in play.journal.watch(True)] == [True]
    texts = [" ".join(f"word{number}x{index}" for index in range(30)) for number in range(3)]
    for number, text in enumerate(texts):
        play.start(f"c{number}", f"Question {number}?")
        play.end(f"c{number}", content=text)
    ids = [play.call(f"c{number}")["session"] for number in range(3)]
    play.journal.changes()
    play.start("all", "\n\n".join(reversed(texts)))
    (session,) = play.journal.changes().sessions
    assert {session.id, *session.merged} == set(ids)
    assert (session.calls, session.depth, session.width) == (4, 2, 3)
    assert session.joined == ["all"]
    (told,) = play.journal.told_calls("t", session.id, 3)
    assert [call["id"] for call in told.calls] == ["c1", "c2", "all"]


def test_what_is_asked_later_changes_no_answer_that_was_finished() -> None:
    play = Play()
    play.start("c1", "Question?")
    play.end("c1", "r1", content="Yes.")
    before = play.call("c1")
    play.end("r1", "r1", content="No.")
    assert play.call("c1") == before


def test_the_longest_path_counts_where_several_lead_to_a_call() -> None:
    play = Play()
    texts = [" ".join(f"word{number}x{index}" for index in range(30)) for number in range(3)]
    for number, prompt in enumerate(("Begin.", f"Go on from this:\n{texts[0]}", "Alone.")):
        play.start(f"c{number}", prompt)
        play.end(f"c{number}", content=texts[number])
    play.start("all", f"{texts[1]}\n\n{texts[2]}")
    summary = play.journal.describe_session("t", play.call("all")["session"])
    assert summary is not None
    assert summary["title"].startswith("Graph of 4 calls, 3 deep")


def test_a_call_is_shown_with_all_that_is_known_of_it() -> None:
    play = Play()
    text = " ".join(f"word{index}" for index in range(40))
    play.start("c1", "Question?", session="mine")
    function = {"name": "n" * 99, "arguments": "{}"}
    calls = [
        {"id": f"x{number}", "function": {**function, "name": f"{number}"}} for number in range(20)
    ]
    calls.append({"id": "long", "function": function})
    play.end("c1", "r1", content=text, tool_calls=calls[-1:] + calls[:-1])
    play.start("c2", f"Shorten: {text}")
    shown = play.call("r1")
    assert shown == {
        "id": "c1", "object": "call", "request_id": "req-c1", "response_id": "r1", "name": "chat",
        "session": "mine", "inferred": False, "model": "m", "state": "done", "submitted": 1.0,
        "finished": 2.0, "error": None, "tools": ["n" * 64, *map(str, range(15))], "links": [],
    }  # fmt: skip
    assert play.call("req-c1") == shown
    reader = play.call("c2")
    ((link),) = reader["links"]
    evidence = link.pop("evidence")
    assert link == {"from": "c1", "kind": "output", "confidence": 0.9}
    assert evidence["message"] == 0
    assert evidence["end"] - evidence["start"] >= len(text)
    assert (reader["state"], reader["finished"], reader["response_id"]) == ("running", None, None)
    assert (reader["session"], reader["inferred"]) == ("mine", False)
    assert play.journal.session_of("t", "c2") == "mine"
    assert play.journal.session_of("t", "c3") is play.journal.session_of("u", "c2") is None


def test_sessions_are_summed_up_and_listed_last_used_first() -> None:
    play = Play()
    for call, session in (("c1", ""), ("c2", "mine"), ("c3", "")):
        play.start(call, f"Question of {call}?", session=session)
    play.end("c1", content="Yes.")
    summary = play.journal.describe_session("t", play.call("c1")["session"])
    assert summary is not None
    assert summary.pop("title").startswith("Chat call · ")
    id_ = summary["id"]
    assert summary == {
        "id": id_, "object": "session", "name": id_, "inferred": True, "models": ["m"],
        "created": 1.0, "last_used": 4.0, "calls": {"unfinished": 0, "finished": 1},
    }  # fmt: skip
    listed = play.journal.describe_sessions("t")
    assert [each["id"] for each in listed["data"]] == [play.call("c3")["session"], id_]
    assert listed["has_more"] is False
    named = play.journal.describe_session("t", "mine")
    assert named is not None
    assert (named["title"], named["inferred"]) == ("mine", False)
    assert play.journal.describe_graph("t", "none") is None
    graph = play.journal.describe_graph("t", "mine")
    assert graph == {"session": "mine", "inferred": False, "calls": [play.call("c2")]}
    for number in range(MAX_LISTED):
        play.start(f"more{number}", f"Question of {number}?")
    listed = play.journal.describe_sessions("t")
    assert (len(listed["data"]), listed["has_more"]) == (MAX_LISTED, True)


@pytest.mark.parametrize(
    ("status", "body", "state", "finished", "response_id"),
    [
        (200, b'{"id": "r", "choices": [{"message": {"content": "a"}}]}', "done", 2.0, "r"),
        (0, b'{"id": "r", "choices": [{"message": {"content": "a"}}]}', "cancelled", 2.0, "r"),
        (399, b"{}", "done", 2.0, None),
        (400, b'{"id": "r"}', "failed", 2.0, None),
        # One that is still to be made, one whose stream failed, one that broke off.
        (200, b'{"id": "r", "status": "queued", "output": []}', "running", None, "r"),
        (200, b'data: {"id": "r", "choices": [{"text": "a"}]}\n\ndata: {"error": {}}\n\n', "failed",
         2.0, "r"),
        (200, b'event: response.failed\ndata: {"id": "r", "type": "x"}\n\n', "failed", 2.0, "r"),
        (200, b'{"id": "r", "choices": [{"message": {"content": "an error"}}]}', "done", 2.0, "r"),
        (200, b'{"id": "r", "text": "error', "done", 2.0, "r"),
        (200, b" " * 5000 + b'{"id": "r", "text": "', "done", 2.0, None),
        (200, gzip.compress(b'{"id": "r", "choices": [{"text": "a"}]}'), "done", 2.0, "r"),
        (200, b"\x1f\x8bdamaged", "done", 2.0, None),
    ],
)  # fmt: skip
def test_how_a_call_ended(
    status: int, body: bytes, state: str, finished: float | None, response_id: str | None
) -> None:
    play = Play()
    play.start("c1", "Question?")
    play.finish("c1", status, body)
    call = play.call("c1")
    assert (call["state"], call["finished"], call["response_id"]) == (state, finished, response_id)
    assert call["error"] == (status if status >= 400 else None)
    play.finish("nobody", 200, body)


def test_statistics_count_what_was_linked() -> None:
    play = Play()
    text = " ".join(f"word{index}" for index in range(40))
    play.start("c1", "Question?")
    play.end("c1", content=text)
    play.start("c2", f"Shorten: {text}")
    play.start("c3", "Another one?", tenant="u")
    found = play.journal.statistics()
    assert found.pop("bytes") > found.pop("largest_tenant_bytes") > 0
    assert found == {
        "linked": 3, "links": 1, "links_by_kind": {"output": 1}, "sessions": 2, "unreadable": 0,
        "tenants": 2, "calls": 3, "templates": 0,
    }  # fmt: skip


def test_profiles_are_shown_with_what_is_known_of_their_calls() -> None:
    play = Play()
    rules = "Answer the question of a person in one word and give no reasons at all: "
    for number in range(40):
        play.start(f"c{number}", f"{rules}{number * 7919} and {number * 104729}?")
        play.end(f"c{number}", content="y" * 40)
    (profile,) = play.journal.describe_profiles("t")["data"]
    assert profile["object"] == "profile"
    assert len(profile.pop("template")) == 16
    assert profile["prefix_bytes"] == len('"messages": [{"role": "user", "content": "') + len(rules)
    assert profile["calls"] > 20
    assert 10 <= profile["output_tokens"]["p50"] <= profile["output_tokens"]["p90"] <= 12
    assert profile["gap_s"] == {"p50": 0.0, "p90": 0.0}
    assert {name: profile[name] for name in ("returns", "feeds_fan_in", "fan_in", "siblings")} == {
        "returns": 0.0, "feeds_fan_in": 0.0, "fan_in": 0.0, "siblings": 0.0
    }  # fmt: skip
    assert profile["successors"] == []
    assert play.journal.statistics()["templates"] == 1
