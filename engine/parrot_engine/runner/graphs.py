"""CUDA graphs of whole steps, one per bucket of tokens and kind of work.

A graph repeats a fixed series of launches for the price of one. The inputs of a step (tokens,
positions and the attention plan) are read from one buffer on the device, with the same layout for
all steps of a bucket. A smaller step is padded with tokens that are not written and whose results
are not read. Steps without a bucket are left to the caller.

All graphs share their memory, and are replayed one after the other on one stream.
"""

from __future__ import annotations

import logging
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from parrot_engine.adapters.slots import AdapterSlots
from parrot_engine.attention.host_plan import HostPlan, Parts, PlanLayout, aligned
from parrot_engine.attention.policy import MAX_MIXED_TOKENS, MAX_SLOTS
from parrot_engine.attention.triton_backend import TritonAttention
from parrot_engine.exceptions import SettingsError
from parrot_engine.kernels.sampling.logits import find_largest
from parrot_engine.models.lora import AdapterRows, GroupedTokens, max_tiles, tile_size
from parrot_engine.runner.paged_model import PagedModel
from parrot_engine.runner.sampler import Computed, Largest
from parrot_engine.runner.staging import Staging
from parrot_engine.runner.step_inputs import Ints, StepTokens

_log = logging.getLogger(__name__)

#: Largest graph without prefill, in tokens; see `MAX_MIXED_TOKENS`.
_MAX_DECODE_TOKENS = 256
#: Graphs without prefill of up to this many tokens include the output head; after others it is
#: launched for the rows that need it.
_MAX_HEAD_TOKENS = 256
#: Approximate memory of the driver per graph.
_BYTES_PER_GRAPH = 4 << 20

_WHOLE = Parts(tiles=False, wide=False, merges=False)
_NARROW = Parts(tiles=False, wide=False)
_SHARED = Parts(tiles=False, wide=True)
_MIXED = Parts(tiles=True, wide=True)
#: With fewer rows than this, keys are always cut.
_MIN_WHOLE_TOKENS = 8


class Key(NamedTuple):
    """The steps that a graph was captured for: up to `num_tokens` tokens, with these parts."""

    num_tokens: int
    parts: Parts
    #: True: tokens may have adapters.
    adapters: bool = False


class Capture(Protocol):
    """Turns a function that launches work into a repeatable one."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Return a function that repeats the launches, and the tensor that they fill."""
        ...


class CudaCapture:
    """Captures CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture `work`; runs it once before, so that all kernels are compiled."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            work()
            # NOTE: not `torch.cuda.graph`, which waits for the device and collects garbage each
            # time.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay, result


class CaptureError(Exception):
    """A model's launches cannot be repeated unchanged; the message gives the reason."""


class TriedCapture:
    """Captures a foreign model, whose code may read results from the device."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture `work`.

        Raises:
            CaptureError: `work` waits for the device, or does something that no graph can contain.
        """
        # Compile kernels first, which may wait too.
        work()
        try:
            # A failed capture leaves torch's allocator in a state in which it frees nothing.
            with _no_waiting():
                work()
            return self._capture(work)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(str(error).partition("\n")[0]) from error


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Make torch operations that wait for the device raise RuntimeError, in the whole process."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class RequiredCapture:
    """Turns a failed capture into an error of the settings; otherwise `StepGraphs` would continue
    without the graph.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture `work`.

        Raises:
            SettingsError: there is not enough memory.
        """
        try:
            return self._capture(work)
        except torch.cuda.OutOfMemoryError as error:
            raise SettingsError("cuda_graphs", f"there is no memory for them: {error}") from error


class _Graph(NamedTuple):
    replay: Callable[[], None]
    computed: Computed


class Bucket:
    """The place of a step of up to `num_tokens` tokens in the buffer."""

    def __init__(
        self,
        num_tokens: int,
        start: int,
        make_layout: Callable[[int], PlanLayout],
        num_slots: int = 0,
    ) -> None:
        """Lay out from `start` of the buffer on; with `num_slots` there is room for adapter
        tiles.
        """
        size = aligned(num_tokens)
        self.num_tokens = num_tokens
        self.start = start
        self.token_ids = start
        self.positions = start + size
        #: For each token, the place of its id in the buffer.
        self.places = start + 2 * size
        #: See `AdapterRows`.
        self.order = start + 3 * size
        self.tiles = self.order + (size if num_slots else 0)
        self.num_tiles = max_tiles(num_tokens, num_slots) if num_slots else 0
        self.layout = make_layout(self.tiles + aligned(3 * self.num_tiles))

    def write(
        self, buffer: Ints, tokens: StepTokens, host: HostPlan, grouped: GroupedTokens | None = None
    ) -> int:
        """Write a step that fits; return the end of the meaningful part."""
        self._write_tokens(buffer, tokens.token_ids, tokens.positions)
        # The previous step's tokens are at the buffer's beginning, row by row.
        buffer[self.places + tokens.pending_at] = tokens.pending_rows
        if grouped is not None:
            tiles = grouped.tiles(tile_size(self.num_tokens)).ravel()
            self._write_adapters(buffer, grouped.order, tiles)
        return self.layout.write(buffer, host.tables, host.lists)

    def write_nothing(self, buffer: Ints) -> int:
        nothing = np.zeros(0, dtype=np.int32)
        self._write_tokens(buffer, nothing, nothing)
        self._write_adapters(buffer, nothing, nothing)
        return self.layout.write_nothing(buffer)

    def rows(self, buffer: Tensor) -> AdapterRows:
        """Return views that tell the kernels which tokens have adapters."""
        tiles = buffer[self.tiles : self.tiles + 3 * self.num_tiles].view(-1, 3)
        order = buffer[self.order : self.order + self.num_tokens]
        return AdapterRows(order, tiles, tile_size(self.num_tokens))

    def _write_adapters(self, buffer: Ints, order: Ints, tiles: Ints) -> None:
        buffer[self.order : self.order + len(order)] = order
        buffer[self.tiles : self.tiles + len(tiles)] = tiles
        # Empty tiles.
        buffer[self.tiles + len(tiles) : self.tiles + 3 * self.num_tiles] = 0

    def _write_tokens(self, buffer: Ints, token_ids: Ints, positions: Ints) -> None:
        count, room = len(token_ids), self.num_tokens
        buffer[self.token_ids : self.token_ids + count] = token_ids
        buffer[self.token_ids + count : self.token_ids + room] = 0
        buffer[self.positions : self.positions + count] = positions
        buffer[self.positions + count : self.positions + room] = 0
        buffer[self.places : self.places + room] = np.arange(
            self.token_ids, self.token_ids + room, dtype=np.int32
        )


class StepGraphs:
    """The graphs of one model with its cache."""

    def __init__(
        self,
        model: PagedModel,
        kv_cache: Tensor,
        attention: TritonAttention,
        capture: Capture,
        *,
        max_rows: int,
        max_context: int,
        max_tokens: int,
        max_slots: int = MAX_SLOTS,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """Make the buffers; `capture_all` captures graphs, or their first use does.

        `max_rows` and `max_tokens` are the limits of a step, `max_context` that of a context. With
        the model's `adapters` there are separate graphs for steps in which tokens use them.
        """
        device = kv_cache.device
        self._model = model
        self._kv_cache = kv_cache
        self.attention = attention
        self._capture = capture
        self._max_sampled = max_rows
        self._adapters = adapters
        self.keys = graph_keys(max_tokens, attention, with_adapters=adapters is not None)
        start = aligned(max_rows)

        def layout(num_tokens: int) -> Callable[[int], PlanLayout]:
            return lambda begin: attention.fixed_layout(
                num_tokens, max_rows, max_context, max_slots, begin
            )

        counts = sorted({key.num_tokens for key in self.keys})
        num_slots = 0 if adapters is None else adapters.count
        self._buckets = {count: Bucket(count, start, layout(count), num_slots) for count in counts}
        size = max(bucket.layout.size for bucket in self._buckets.values())
        #: Tokens of the previous step, then the layout of a bucket.
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = Staging(self._buffer)
        self._partials = attention.partials(
            max(bucket.layout.capacity.slots for bucket in self._buckets.values())
        )
        head_tokens = max((count for count in counts if count <= _MAX_HEAD_TOKENS), default=0)
        self._logits = torch.empty(
            (head_tokens, model.config.vocab_size), dtype=torch.float32, device=device
        )
        self._largest = Largest(
            torch.empty(head_tokens, dtype=torch.float32, device=device),
            torch.empty(head_tokens, dtype=torch.int64, device=device),
            torch.empty(head_tokens, dtype=torch.int64, device=device),
        )
        #: None: could not be captured.
        self._graphs: dict[Key, _Graph | None] = {}
        #: For each set of parts, with and without adapters: the keys that cover it, smallest first.
        self._covering = {
            (parts, adapted): [
                key for key in self.keys if key.parts.cover(parts) and key.adapters == adapted
            ]
            for parts in map(Parts._make, product((False, True), repeat=3))
            for adapted in (False, True)
        }
        #: Steps computed by a graph, and steps computed without one.
        self.num_replays = 0
        self.num_misses = 0
        #: True: graphs are also captured while there is no step to run.
        self.ahead = False

    def capture_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every graph, the largest first; `progress` is called with (done, total)."""
        more = True
        while more:
            more = self.capture_next()
            if progress is not None:
                progress(len(self._graphs), len(self.keys))

    def capture_next(self) -> bool:
        """Capture the largest missing graph; return true while others are missing."""
        missing = [key for key in self.keys if key not in self._graphs]
        if missing:
            self._graph(missing[-1])
            if len(missing) > 1:
                return True
            if self._buffer.is_cuda:
                # Release the memory that the first run of the work took.
                torch.cuda.empty_cache()
        return False

    def forget(self) -> None:
        """Release all graphs and their memory."""
        self._graphs.clear()

    def run(
        self,
        tokens: StepTokens,
        host: HostPlan,
        sampled: Tensor,
        grouped: GroupedTokens | None = None,
    ) -> Computed | None:
        """Launch a step, or return None if no graph covers it.

        `sampled` has the previous step's tokens, row by row, on the device. The results cover only
        the step's own tokens.
        """
        count = len(tokens.token_ids)
        key = self._choose(count, host, adapted=grouped is not None)
        graph = None if key is None else self._graph(key)
        if key is None or graph is None or len(sampled) > self._max_sampled:
            self.num_misses += 1
            return None
        if len(tokens.pending_at):
            self._buffer[: len(sampled)].copy_(sampled)
        bucket = self._buckets[key.num_tokens]
        self._staging.send(bucket.start, bucket.write(self._staging.take(), tokens, host, grouped))
        graph.replay()
        self.num_replays += 1
        if count == key.num_tokens:
            return graph.computed
        hidden, logits, largest = graph.computed
        if logits is None or largest is None:
            return Computed(hidden[:count], None)
        return Computed(hidden[:count], logits[:count], _first(largest, count))

    def _choose(self, count: int, host: HostPlan, *, adapted: bool) -> Key | None:
        keys = self._covering[host.parts, adapted]
        place = bisect_left(keys, count, key=lambda key: key.num_tokens)
        if place == len(keys):
            return None
        key = keys[place]
        # Larger buckets have equal room for a row's blocks, and little more for items.
        return key if self._buckets[key.num_tokens].layout.holds(*host) else None

    def _graph(self, key: Key) -> _Graph | None:
        if key not in self._graphs:
            try:
                self._graphs[key] = self._make(key)
            except torch.cuda.OutOfMemoryError as error:
                _log.warning("no memory for the graph of %d tokens: %s", key.num_tokens, error)
                self._graphs[key] = None
            except CaptureError as error:
                _log.warning("steps are launched kernel by kernel: %s", error)
                self._graphs = dict.fromkeys(self.keys)
        return self._graphs[key]

    @torch.inference_mode()
    def _make(self, key: Key) -> _Graph:
        bucket = self._buckets[key.num_tokens]
        count = bucket.num_tokens
        plan = self.attention.fixed_plan(self._buffer, bucket.layout, key.parts, self._partials)
        places = self._buffer[bucket.places : bucket.places + count]
        positions = self._buffer[bucket.positions : bucket.positions + count]
        adapters = self._adapters if key.adapters else None
        logits, largest = None, None
        if not key.parts.tiles and count <= len(self._logits):
            logits, largest = self._logits[:count], _first(self._largest, count)

        def work() -> Tensor:
            token_ids = self._buffer.index_select(0, places)
            step = token_ids, positions, self._kv_cache, self.attention, plan
            if adapters is None:
                hidden = self._model(*step)
            else:
                hidden = adapters.model(*step, bucket.rows(self._buffer))
            if logits is not None and largest is not None:
                self._model.logits(hidden, out=logits)
                find_largest(logits, *largest)
            return hidden

        # The buffer's content was laid out for another bucket.
        self._staging.send(bucket.start, bucket.write_nothing(self._staging.take()))
        replay, hidden = self._capture(work)
        return _Graph(replay, Computed(hidden, logits, largest))


def _first(largest: Largest, count: int) -> Largest:
    return Largest(*(part[:count] for part in largest))


def graph_keys(
    max_tokens: int, attention: TritonAttention, *, with_adapters: bool = False
) -> list[Key]:
    """Return the graphs for steps of up to `max_tokens` tokens, smallest first.

    Steps without prefill have separate graphs, because a launch without work takes some
    microseconds per layer. Among them there are separate graphs for steps in which many rows share
    a prefix, steps without cut keys, and steps with adapters.
    """
    decode = _up_to(min(max_tokens, _MAX_DECODE_TOKENS), _decode_buckets())
    mixed = _up_to(min(max_tokens, MAX_MIXED_TOKENS), _mixed_buckets())
    whole = [count for count in decode if count >= _MIN_WHOLE_TOKENS]
    keys = [
        Key(count, parts, adapted)
        for adapted in ((False, True) if with_adapters else (False,))
        for parts, counts in (
            (_WHOLE, whole),
            (_NARROW, decode),
            (_SHARED, decode),
            (_MIXED, mixed),
        )
        for count in counts
        if count >= attention.min_tokens(parts)
    ]
    return sorted(keys)


def graph_bytes(
    max_tokens: int,
    *,
    vocab_size: int,
    step_bytes: int,
    slot_bytes: int,
    with_adapters: bool = False,
) -> int:
    """Estimate the memory of all graphs, to be reserved before the cache takes the rest.

    `step_bytes` is the memory of the largest step, of `max_tokens` tokens, besides the cache;
    `slot_bytes` is that of one partial attention result.
    """
    activations = int(step_bytes * min(1.0, MAX_MIXED_TOKENS / max_tokens))
    # Logits left by all graphs, and for some models their form in the model's dtype before.
    logits = 2 * _MAX_HEAD_TOKENS * vocab_size * 4
    num_graphs = 3 * len(_decode_buckets()) + len(_mixed_buckets())
    num_graphs *= 2 if with_adapters else 1
    return activations + logits + MAX_SLOTS * slot_bytes + num_graphs * _BYTES_PER_GRAPH


def _decode_buckets() -> list[int]:
    """Return sizes that are dense for short steps, and at most a sixth apart for longer ones."""
    return [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32)]


def _mixed_buckets() -> list[int]:
    """Return sizes that are denser where tokens cost arithmetic besides the reading of weights."""
    return [16, 32, 48, *range(64, 256, 32), *range(256, 512, 64), *range(512, 1025, 128)]


def _up_to(limit: int, buckets: Sequence[int]) -> list[int]:
    """Return the buckets below `limit`, and `limit` itself."""
    below = [count for count in buckets if count < limit]
    return [*below, limit]
