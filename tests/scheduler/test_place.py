"""The simple placement rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parrot_scheduler.place import EngineLoad, least_loaded

loads = st.lists(
    st.builds(EngineLoad, running=st.integers(0, 9), queued_tokens=st.integers(0, 99)), min_size=1
)


@given(loads)
def test_nobody_is_less_loaded(engines: list[EngineLoad]) -> None:
    chosen = engines[least_loaded(engines)]
    assert all(
        (chosen.running, chosen.queued_tokens) <= (other.running, other.queued_tokens)
        for other in engines
    )


def test_ties_go_to_fewer_tokens_then_to_the_first() -> None:
    assert least_loaded([EngineLoad(1, 5), EngineLoad(1, 3), EngineLoad(1, 3)]) == 1


def test_no_engine() -> None:
    with pytest.raises(ValueError, match="no engine"):
        least_loaded([])
