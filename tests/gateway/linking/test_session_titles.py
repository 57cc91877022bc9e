from __future__ import annotations

import pytest

from parrot_gateway.linking.session_titles import declared_title, inferred_title

CHAT = "/v1/chat/completions"
ID = "sess_91b5bc865948c0a547933009"


@pytest.mark.parametrize(
    ("depths", "kinds", "title"),
    [
        ({1: 1}, set(), "Chat call · 91b5bc"),
        ({1: 3}, set(), "3 calls side by side · 91b5bc"),
        ({1: 1, 2: 1, 3: 1}, {"continues"}, "Chat of 3 turns · 91b5bc"),
        ({1: 1, 2: 1, 3: 1}, {"continues", "output"}, "Chain of 3 calls · 91b5bc"),
        ({1: 6, 2: 1}, {"output"}, "Map-reduce of 6 · 91b5bc"),
        ({1: 1, 2: 4}, {"output"}, "Fan-out to 4 · 91b5bc"),
        ({1: 1, 2: 3, 3: 2}, {"output"}, "Graph of 6 calls, 3 deep · 91b5bc"),
    ],
)
def test_an_inferred_session_is_called_by_its_shape(
    depths: dict[int, int], kinds: set[str], title: str
) -> None:
    assert inferred_title(ID, [CHAT] * sum(depths.values()), depths, kinds, ()) == title


def test_an_agent_is_called_by_its_tools() -> None:
    title = inferred_title(ID, [CHAT] * 2, {1: 1, 2: 1}, {"tool"}, ["search", "add", "mail"])
    assert title == "Agent with search, add + 1 · 91b5bc"


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("tale", "tale"),
        ("my:own", "my:own"),
        ("x-session-id:desk 7", "desk 7"),
        ("x-session-id:0b52175793d24a5c8d5b9f3ce1a2b3c4", "Session · 0b5217"),
        ("previous_response_id:resp_659d76141ae10afb35365facc3dc", "Responses · 659d76"),
        ("traceparent:4bf92f3577b34da6a3ce929d0e0e4736", "Trace · 4bf92f"),
    ],
)
def test_a_declared_session_keeps_its_name(name: str, title: str) -> None:
    assert declared_title(name) == title
