"""Calls that can be linked to, and what is left of those that are forgotten."""

from __future__ import annotations

import pytest

from parrot_gateway.linking.linker.call_store import CallStore, StoredCall, kept_keys
from parrot_gateway.linking.linker.conversation import Choice
from parrot_gateway.linking.linker.links import LinkedSession


def started(store: CallStore, state: int) -> StoredCall:
    number = store.next_number()
    session = LinkedSession(f"s{number}", float(number), False)
    call = StoredCall(number, f"c{number}", session, float(number), state, kept_keys([]), 0)
    store.add(call)
    return call


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_calls_that_made_room_leave_nothing_in_whatever_order_they_ended(
    order: tuple[int, ...],
) -> None:
    store = CallStore(max_calls=4, max_text=100_000, max_fingerprints=1 << 12)
    equal = [started(store, 7) for _ in range(4)]
    for place in order:
        store.finish(equal[place], [Choice("An answer that all four of them gave.")], 10.0)
    (key,) = store.wholes
    for gone in range(1, 5):
        started(store, 100 + gone)
        assert {call.number for call in store.find(store.wholes, key)} == set(range(gone + 1, 5))
    assert not store.wholes
    assert not store.answers
    assert not store.ends
    assert 7 not in store.prompts
