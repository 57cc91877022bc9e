"""Work lists that are to be the same, whatever the way by which they were made."""

from __future__ import annotations

import numpy as np
from parrot_engine.attention.work_list import WorkList


def check_equal(found: WorkList, expected: WorkList) -> None:
    """Every array with its type, and every number."""
    for name, value in expected._asdict().items():
        mine = getattr(found, name)
        if isinstance(value, np.ndarray):
            assert np.array_equal(mine, value), name
            assert mine.dtype == value.dtype, name
        else:
            assert mine == value, name
