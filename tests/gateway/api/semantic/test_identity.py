"""Sessions named by what clients send anyway."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.session_sources import Source, all_of

from parrot_gateway.api.semantic.identity import Identity, SessionIdentity
from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.settings.model import SESSION_SOURCES, SessionSettings

#: Strongest first; each names a session by itself.
SOURCES: list[Source] = [
    ({}, {"previous_response_id": "resp_1"}, "previous_response_id:resp_1"),
    ({}, {"conversation": "c-1"}, "conversation:c-1"),
    ({"x-session-id": "abc"}, {}, "x-session-id:abc"),
    ({"x-session-affinity": "abc"}, {}, "x-session-affinity:abc"),
    ({"x-aibrix-session-key": "k"}, {}, "x-aibrix-session-key:k"),
    ({"x-claude-code-session-id": "cc"}, {}, "x-claude-code-session-id:cc"),
    ({"session-id": "codex"}, {}, "session-id:codex"),
    ({"session_id": "codex"}, {}, "session_id:codex"),
    ({"thread-id": "codex"}, {}, "thread-id:codex"),
    ({"x-dynamo-session-id": "d"}, {}, "x-dynamo-session-id:d"),
    ({"x-litellm-trace-id": "l"}, {}, "x-litellm-trace-id:l"),
    ({"x-litellm-session-id": "l"}, {}, "x-litellm-session-id:l"),
    ({"x-session-token": "t"}, {}, "x-session-token:t"),
    ({"x-smg-routing-key": "r"}, {}, "x-smg-routing-key:r"),
    ({"conversation_id": "c", "user-agent": "codex_cli_rs/0.1"}, {}, "conversation_id:c"),
    ({"x-acme-session-id": "12345678"}, {}, "x-acme-session-id:12345678"),
    ({"baggage": "a=b, session.id=s%201;p=1"}, {}, "baggage:s 1"),
    ({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}, {}, f"traceparent:{'ab' * 16}"),
    ({}, {"prompt_cache_key": "pck"}, "prompt_cache_key:pck"),
    ({}, {"metadata": {"session_id": "m"}}, "metadata:m"),
]


def find(
    headers: dict[str, str], body: Any, sources: tuple[str, ...] = SESSION_SOURCES
) -> Identity | None:
    raw = [(name.encode(), text.encode()) for name, text in headers.items()]
    head = CallRequest("chat", json.dumps(body).encode()).head
    return SessionIdentity(sources).find(raw, head)


@pytest.mark.parametrize(("headers", "body", "name"), SOURCES)
def test_each_source_names_a_session(
    headers: dict[str, str], body: dict[str, Any], name: str
) -> None:
    found = find(headers, body)
    assert found is not None
    assert found.name == name


def test_the_first_header_of_a_name_counts() -> None:
    head = CallRequest("chat", b"{}").head
    headers = [(b"x-session-id", b"one"), (b"x-session-id", b"two")]
    found = SessionIdentity(SESSION_SOURCES).find(headers, head)
    assert found is not None
    assert found.name == "x-session-id:one"


def test_the_order_is_kept() -> None:
    """Taking the strongest source away, one by one, leaves the next."""
    left = list(SOURCES)
    while left:
        headers, body = all_of(left)
        found = find(headers, body)
        assert found is not None
        assert found.name == left[0][2]
        left.pop(0)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, {}),
        ({"x-session-id": ""}, {}),
        ({"x-session-id": "x" * 201}, {}),
        ({"x-session-id": "a\x07b"}, {}),
        ({"conversation_id": "c", "user-agent": "other"}, {}),
        ({"x-acme-session-id": "short"}, {}),
        ({"baggage": "user.id=5"}, {}),
        ({"traceparent": "00-zz"}, {}),
        ({"traceparent": f"00-{'0' * 32}-{'cd' * 8}-01"}, {}),
        ({}, {"metadata": "x"}),
        ({}, {"metadata": {"session_id": 5}}),
        ({}, {"previous_response_id": None}),
        ({}, {"conversation": [1]}),
        ({}, {"prompt_cache_key": {"a": "b"}}),
    ],
)
def test_others_name_none(headers: dict[str, str], body: Any) -> None:
    assert find(headers, body) is None


def test_a_conversation_may_be_an_object() -> None:
    found = find({}, {"conversation": {"id": "conv_1"}})
    assert found == Identity("conversation:conv_1", "conversation")


@pytest.mark.parametrize("flags", ["00", "01"])
def test_of_a_trace_only_its_id_counts(flags: str) -> None:
    """Neither the span, the sampling flag nor anything a later version appends matters."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    for ending in ("", "-what-a-later-version-adds"):
        found = find({"traceparent": f"00-{trace}-{'0' * 15}{flags[1]}-{flags}{ending}"}, {})
        assert found == Identity(f"traceparent:{trace}", "traceparent")


def test_the_order_is_a_setting() -> None:
    headers = {"x-session-id": "abc", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    body = {"prompt_cache_key": "pck", "metadata": {"session_id": "m"}}
    order = ("metadata.session_id", "header:X-Mine", "traceparent", "x-session-id")
    assert find(headers, body, order) == Identity("metadata:m", "metadata")
    assert find(headers, {}, order) == Identity(f"traceparent:{'ab' * 16}", "traceparent")
    assert find({**headers, "x-mine": "1"}, {}, order) == Identity("x-mine:1", "x-mine")
    assert find({"x-claude-code-session-id": "cc"}, {"prompt_cache_key": "p"}, order) is None
    assert find({"x-acme-session-id": "12345678"}, {}, order) is None


def test_an_empty_order_finds_nothing() -> None:
    for headers, body, _ in SOURCES:
        assert find(headers, body, ()) is None


@pytest.mark.parametrize("order", [("x-sesion-id",), ("header:",), ("baggage", "baggage")])
def test_unknown_sources_are_no_setting(order: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="source"):
        SessionSettings(identity=order)
