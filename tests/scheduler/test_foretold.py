"""Groups of calls that will be read together, guessed from when they come."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from parrot_scheduler.foretold import (
    ENOUGH_CALLS,
    FAN_IN_SHARE,
    MAX_SIZE,
    ForetoldGroups,
    feeds_group,
)


def test_calls_that_come_together_are_a_group_of_the_usual_size() -> None:
    groups = ForetoldGroups(1.0)
    refs = [groups.join("map", 3.9, now / 10) for now in range(8)]
    assert Counter(refs) == {refs[0]: 4, refs[4]: 4}
    assert refs[0].size == 4


def test_a_pause_begins_another_group() -> None:
    groups = ForetoldGroups(1.0)
    first = groups.join("map", 16, 0.0)
    assert groups.join("map", 16, 0.9) == first
    assert groups.join("map", 16, 1.8) == first
    assert groups.join("map", 16, 2.9) != first


def test_a_single_call_somebody_waits_for_is_none() -> None:
    assert feeds_group(1.0, 16.0, 16.0)
    assert not feeds_group(FAN_IN_SHARE - 0.01, 16.0, 16.0)
    assert not feeds_group(1.0, ENOUGH_CALLS - 1, 16.0), "too few calls to believe it"
    assert not feeds_group(1.0, 16.0, 1.0), "each is read beside calls of other kinds"


@given(
    calls=st.lists(
        st.tuples(st.sampled_from("abcd"), st.floats(0, 1e6), st.floats(-1, 3)), max_size=60
    )
)
def test_whatever_comes_groups_are_of_one_kind_and_never_too_large(
    calls: list[tuple[str, float, float]],
) -> None:
    groups, now, seen = ForetoldGroups(1.0, max_kinds=3), 0.0, Counter[str]()
    sizes: dict[str, int] = {}
    for kind, siblings, step in calls:
        now += step
        ref = groups.join(kind, siblings, now)
        seen[ref.id] += 1
        sizes[ref.id] = max(sizes.get(ref.id, 0), ref.size)
        assert ref.id.startswith(f"{kind}/")
        assert 2 <= ref.size <= MAX_SIZE
        assert len(groups) <= 3
    assert all(count <= sizes[name] for name, count in seen.items())
