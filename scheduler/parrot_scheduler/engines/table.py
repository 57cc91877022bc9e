"""The engines of one model as a table: one row per engine, one numpy column per fact.

Rows are reused: a row without an engine has `accepts` False and an empty id. Policies read the
columns; only `EnginePool` writes them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from parrot_scheduler.task import EngineDescription, EngineId, StepModel

Column = npt.NDArray[np.float64]

_FIRST_ROWS = 8
_COLUMNS = (
    "capacity", "max_batch", "max_batch_tokens", "block_tokens", "batch", "latency_batch",
    "pending_prefill", "working_set", "retained", "step_limit_s", "weights_s", "context_token_s",
    "prefill_token_s", "overhead_s", "sequence_s",
)  # fmt: skip


class TableScalars:
    """The columns of an `EngineTable` for access to single values, in the same memory.

    Reading and writing plain floats takes a third of the time that numpy takes.
    """

    __slots__ = _COLUMNS

    capacity: array[float]
    max_batch: array[float]
    max_batch_tokens: array[float]
    block_tokens: array[float]
    batch: array[float]
    latency_batch: array[float]
    pending_prefill: array[float]
    working_set: array[float]
    retained: array[float]
    step_limit_s: array[float]
    weights_s: array[float]
    context_token_s: array[float]
    prefill_token_s: array[float]
    overhead_s: array[float]
    sequence_s: array[float]


class EngineTable:
    """Engines of one model.

    Columns, all of the same length and float64 unless said:

    - `capacity`, `max_batch`, `max_batch_tokens`, `block_tokens`: as the engine described itself.
    - `batch`: sequences of tasks placed there and not ended; `latency_batch`: those of them with
      a user waiting.
    - `pending_prefill`: prompt tokens placed there that are neither filled nor expected in cache.
    - `working_set`: tokens of KV that the tasks placed there will need, expected output included;
      blocks known to be shared count once.
    - `retained`: tokens of KV that paused applications left there for their return.
    - `step_limit_s`: the tightest time per token promised to a task there; inf if there is none.
    - `weights_s`, `context_token_s`, `prefill_token_s`, `overhead_s`, `sequence_s`: its step model.
    - `accepts` (bool): takes new work.
    """

    capacity: Column
    max_batch: Column
    max_batch_tokens: Column
    block_tokens: Column
    batch: Column
    latency_batch: Column
    pending_prefill: Column
    working_set: Column
    retained: Column
    step_limit_s: Column
    weights_s: Column
    context_token_s: Column
    prefill_token_s: Column
    overhead_s: Column
    sequence_s: Column

    def __init__(self) -> None:
        self.ids: list[EngineId] = [""] * _FIRST_ROWS
        self.descriptions: list[EngineDescription | None] = [None] * _FIRST_ROWS
        self.accepts: npt.NDArray[np.bool_] = np.zeros(_FIRST_ROWS, dtype=np.bool_)
        self._rows: dict[EngineId, int] = {}
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))
        #: Single values, by the columns' names.
        self.scalars = TableScalars()
        for name in _COLUMNS:
            self._set_column(name, array("d", bytes(8 * _FIRST_ROWS)))

    def __len__(self) -> int:
        """Return the number of engines, draining ones included."""
        return len(self._rows)

    def row_of(self, engine_id: EngineId | None) -> int:
        """Return the row of an engine; -1 if it is not here."""
        return -1 if engine_id is None else self._rows.get(engine_id, -1)

    def add(self, engine: EngineDescription) -> int:
        """Add an engine that is not here yet; return its row."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._rows[engine.id] = row
        self.ids[row] = engine.id
        self.descriptions[row] = engine
        for name in _COLUMNS:
            getattr(self.scalars, name)[row] = 0.0
        self.capacity[row] = engine.capacity_tokens
        self.max_batch[row] = engine.max_batch
        self.max_batch_tokens[row] = engine.max_batch_tokens
        self.block_tokens[row] = engine.block_tokens
        self.step_limit_s[row] = np.inf
        self.set_step_model(row, engine.step_model)
        self.accepts[row] = True
        return row

    def remove(self, engine_id: EngineId) -> None:
        """Remove an engine; unknown ids are ignored."""
        row = self._rows.pop(engine_id, -1)
        if row >= 0:
            self.accepts[row] = False
            self.ids[row] = ""
            self.descriptions[row] = None
            self._free.append(row)

    def set_step_model(self, row: int, model: StepModel) -> None:
        """Replace the engine's step model with a better one."""
        self.weights_s[row] = model.weights_s
        self.context_token_s[row] = model.context_token_s
        self.prefill_token_s[row] = model.prefill_token_s
        self.overhead_s[row] = model.overhead_s
        self.sequence_s[row] = model.sequence_s

    def _grow(self) -> None:
        old = len(self.ids)
        self.ids += [""] * old
        self.descriptions += [None] * old
        self.accepts = np.concatenate([self.accepts, np.zeros(old, dtype=np.bool_)])
        for name in _COLUMNS:
            self._set_column(name, getattr(self.scalars, name) + array("d", bytes(8 * old)))
        self._free = list(range(2 * old - 1, old - 1, -1))

    def _set_column(self, name: str, scalars: array[float]) -> None:
        setattr(self.scalars, name, scalars)
        setattr(self, name, np.frombuffer(scalars))


def rows_of(bits: int) -> Iterator[int]:
    """Iterate over the rows of a set in ascending order."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def set_of(rows: npt.NDArray[np.bool_]) -> int:
    """Build a set of rows from one boolean per row."""
    return int.from_bytes(np.packbits(rows, bitorder="little").tobytes(), "little")
