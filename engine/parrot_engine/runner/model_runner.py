"""The model runner: executes a batch on one device, and returns tokens and scores.

It owns the weights, the KV cache and the attention back end of one model on one device. It neither
decides what runs in a step nor allocates blocks.

`launch` puts a whole step on the device's stream, sampling included, and does not wait for it.
Steps run in launch order, and each sees the writes of the previous one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parrot_engine.adapters.slots import AdapterSlots
from parrot_engine.attention.interface import AttentionBackend, AttentionShape
from parrot_engine.attention.storage import cache_dtype, is_quantized, tile_rows
from parrot_engine.attention.torch_backend import TorchAttention
from parrot_engine.batch import (
    AdapterMemory,
    BatchRow,
    BatchRows,
    BlockCopy,
    Launch,
    RowOutcome,
    Runner,
    SampledToken,
    StepBatch,
    TokenOutcomes,
)
from parrot_engine.kernels.selection import Kernels
from parrot_engine.models.config import GenerationDefaults
from parrot_engine.models.lora import AdapterRows, GroupedTokens, tile_size
from parrot_engine.models.parts import weight_bytes
from parrot_engine.models.sharding import Collective
from parrot_engine.protocol import TokenLogprobs
from parrot_engine.runner.paged_model import ModelShape, PagedModel
from parrot_engine.runner.sampler import (
    Computed,
    Largest,
    Scores,
    StepLogits,
    assemble_scores,
    assemble_tokens,
    choose,
    score,
)
from parrot_engine.runner.step_inputs import (
    StepInputs,
    StepTokens,
    Upload,
    gather_tokens,
    make_masks,
)

if TYPE_CHECKING:
    from parrot_engine.runner.graphs import Capture, StepGraphs


def kv_bytes_per_block(
    config: ModelShape, block_size: int, dtype: torch.dtype, *, quantized: bool = False
) -> int:
    """Return the bytes of one block's keys and values over all layers, for a model of `dtype`."""
    rows = tile_rows(block_size, config.head_dim, quantized=quantized)
    elements: int = 2 * config.num_layers * config.num_kv_heads * config.head_dim * rows
    return elements * int(cache_dtype(dtype, quantized=quantized).itemsize)


def _attention_backend(
    kernels: Kernels,
    shape: AttentionShape,
    *,
    windows: Sequence[int | None],
    device: torch.device,
    dtype: torch.dtype,
    quantized: bool,
    softcap: float | None,
    deterministic: bool,
) -> AttentionBackend[Any]:
    make: Callable[..., AttentionBackend[Any]] = TorchAttention
    if kernels == "triton":
        # Imports triton, which is installed only where it is used.
        from parrot_engine.attention.triton_backend import TritonAttention

        make = partial(TritonAttention, deterministic=deterministic)
    return make(
        shape, windows=windows, device=device, dtype=dtype, quantized=quantized, softcap=softcap
    )


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the thread's current one: Triton launches there, wherever arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Download:
    """Tensors being copied to the host.

    On CUDA they are copied into pinned memory, followed by an event. Waiting for the event waits
    for the earlier work of this stream only, and leaves the core to other threads.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Start copying `tensors`, all on `device`; without tensors, it still waits for the work.

        Errors on the device thus appear for this step.
        """
        self._event: torch.cuda.Event | None = None
        if device.type != "cuda":
            self._host = list(tensors)
            return
        self._host = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors
        ]
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(torch.cuda.current_stream(device))

    def ready(self) -> bool:
        """Return true if `wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._host


class AdapterUpload:
    """Tokens with adapters, being sent to the device."""

    def __init__(self, grouped: GroupedTokens, num_tokens: int, upload: Upload) -> None:
        self._runs = grouped.runs
        self._tile_size = tile_size(num_tokens)
        self._order = upload.array(grouped.order)
        self._tiles = upload.array(grouped.tiles(self._tile_size).ravel())

    def rows(self) -> AdapterRows:
        """Return the rows; valid once they were sent."""
        order, tiles = (part.tensor.to(torch.int32) for part in (self._order, self._tiles))
        return AdapterRows(order, tiles.view(-1, 3), self._tile_size, self._runs)


class InFlightStep:
    """A step in progress; implements `parrot_engine.batch.Launch`."""

    def __init__(
        self, batch: StepBatch, computed: StepLogits, device: torch.device, kernels: Kernels
    ) -> None:
        """Take a step whose logits are being computed, and sample unless it `awaits_tokens`."""
        self._batch = batch
        self._computed: StepLogits | None = computed
        self._device = device
        self._kernels = kernels
        self._inputs: StepInputs
        #: int64 `[num_rows]`, on the device: the token sampled for each row of the batch, 0 for the
        #: others. It is within the vocabulary even if the row's logits were not finite; a row with
        #: draft tokens has any of its tokens. None before sampling.
        self.sampled: Tensor | None = None
        self._has_scores = False
        self._download: Download
        if not batch.awaits_tokens:
            self.sample()

    @torch.inference_mode()
    def sample(self) -> None:
        """Sample and score on the device, and start the copies to the host.

        All host work for it, grammar masks included, is done here, while the device computes the
        logits.
        """
        assert self._computed is not None, "sampled already"
        (logits, largest), self._computed = self._computed, None
        upload = Upload()
        inputs = self._inputs = StepInputs(self._batch, logits.shape[1], upload)
        with current_device(self._device):
            upload.send(self._device)
            self._sample(inputs, logits, largest)

    def _sample(self, inputs: StepInputs, logits: Tensor, largest: Largest | None) -> None:
        device, kernels = self._device, self._kernels
        tensors: list[Tensor] = []
        if inputs.sampled:
            masks = make_masks(inputs.sampling.rows, logits.shape[1], device)
            if inputs.at is None:
                choice = choose(logits, inputs.sampling, masks, largest=largest, kernels=kernels)
            else:
                choice = choose(logits[inputs.at.tensor], inputs.sampling, masks, kernels=kernels)
            tensors.append(choice.checked)
            if choice.scores is not None:
                self._has_scores = True
                tensors += choice.scores
        for _, scoring, first, targets in inputs.scored:
            part = logits[first : first + len(scoring.target_token_ids)]
            tensors += score(part, targets.tensor, scoring.num_top)
        if inputs.sampled and inputs.rows is None:
            self.sampled = choice.tokens
        else:
            self.sampled = torch.zeros(inputs.num_rows, dtype=torch.int64, device=device)
            if inputs.sampled and inputs.rows is not None:
                self.sampled[inputs.rows.tensor] = choice.tokens
        self._download = Download(tensors, device)

    def ready(self) -> bool:
        """Return true if `outcome` would return at once."""
        return self._download.ready()

    def outcome(self) -> Sequence[RowOutcome]:
        """Wait for the step, but nothing launched after it; see `Launch`."""
        parts = iter(self._download.wait())
        inputs = self._inputs
        sampled: list[SampledToken] = []
        if inputs.sampled:
            checked = next(parts)
            if not inputs.scored and not inputs.has_drafts and not self._has_scores:
                return TokenOutcomes(_by_row(checked.tolist(), inputs))
            scores = Scores(next(parts), next(parts), next(parts)) if self._has_scores else None
            sampled = assemble_tokens(inputs.sampling, checked, scores)
        if inputs.rows is None and not inputs.scored:
            return list(map(RowOutcome, sampled))
        tokens: dict[int, list[SampledToken]] = {}
        for row, token in zip(inputs.sampled, sampled, strict=True):
            tokens.setdefault(row, []).append(token)
        scored: dict[int, list[TokenLogprobs]] = {}
        for row, scoring, _, _ in inputs.scored:
            found = Scores(next(parts), next(parts), next(parts))
            scored[row] = assemble_scores(scoring.target_token_ids, found)
        return [
            _outcome(tokens.get(index, ()), scored.get(index, ()))
            for index in range(inputs.num_rows)
        ]


def _by_row(token_ids: list[int | None], inputs: StepInputs) -> list[int | None]:
    """Return the token sampled for each row of a step, if any."""
    if inputs.rows is None:
        return token_ids
    by_row: list[int | None] = [None] * inputs.num_rows
    for row, token_id in zip(inputs.sampled, token_ids, strict=True):
        by_row[row] = token_id
    return by_row


def _outcome(tokens: Sequence[SampledToken], scores: Sequence[TokenLogprobs]) -> RowOutcome:
    first = tokens[0] if tokens else None
    return RowOutcome(first, scores, _is_sound(scores), tokens[1:])


def _is_sound(scores: Sequence[TokenLogprobs]) -> bool:
    return not any(entry.logprob != entry.logprob for entry in scores)


class ModelRunner(Runner):
    """Executes steps with one model. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        model: PagedModel,
        defaults: GenerationDefaults,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
        kernels: Kernels = "torch",
        collective: Collective | None = None,
        adapters: AdapterSlots | None = None,
        deterministic: bool = False,
    ) -> None:
        """Take a loaded model and allocate a KV cache of `num_blocks` blocks for it.

        `dtype` is the model's, and the cache's unless `kv_cache_dtype` overrides it. With
        `collective` the model and the cache are one rank's part; every rank must launch the same
        steps. `adapters` are the model's.
        """
        config = model.config
        self._model = model
        self._adapter_slots = adapters
        self.adapters: AdapterMemory | None = adapters
        self._device = device
        self._kernels = kernels
        #: Tokens of the output head: the width of the logits.
        self.vocab_size = config.vocab_size
        self.eos_token_ids = list(defaults.eos_token_ids)
        #: Sampling defaults of the checkpoint, by the names of `SamplingParams`.
        self.default_sampling = dict(defaults.sampling)
        #: Longest context in tokens.
        self.max_position = config.max_position
        self.architecture = config.architecture
        self.dtype = str(dtype).removeprefix("torch.")
        self.device = str(device)
        if isinstance(model, torch.nn.Module):
            self.weight_bytes = weight_bytes(model)
        self.num_blocks = num_blocks
        self.block_size = block_size
        quantized = is_quantized(kv_cache_dtype, config.head_dim)
        self.kv_bytes_per_block = kv_bytes_per_block(config, block_size, dtype, quantized=quantized)
        # NOTE: left uninitialised, so that on a CPU pages are allocated as they are used; attention
        # back ends never read a slot before it is written.
        rows = tile_rows(block_size, config.head_dim, quantized=quantized)
        self._kv_cache = torch.empty(
            (config.num_layers, 2, num_blocks, config.num_kv_heads, rows, config.head_dim),
            device=device,
            dtype=cache_dtype(dtype, quantized=quantized),
        )
        shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, block_size)
        self._attention = _attention_backend(
            kernels,
            shape,
            windows=config.windows,
            device=device,
            dtype=dtype,
            quantized=quantized,
            softcap=config.attention_softcap,
            deterministic=deterministic,
        )

        #: The last launched step, and the tokens sampled in the step before the running launch.
        self._before: InFlightStep | None = None
        self._sampled = torch.zeros(0, dtype=torch.int64, device=device)
        self._graphs: StepGraphs | None = None
        self._collective = collective

    @property
    def kv_cache(self) -> Tensor:
        """Return the cache in the layout of `attention.interface`, for inspection."""
        return self._kv_cache

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> Launch:
        """Start one step; on CUDA it runs while the host continues.

        Block copies come first, in order; then the KV of all tokens is written. Rows with `pending`
        take tokens of the previously launched step, on the device. Values that are not finite fail
        only their row.

        Raises:
            torch.cuda.OutOfMemoryError: there is no memory for this step; launched steps continue.
        """
        with current_device(self._device):
            if self._before is not None and self._before.sampled is not None:
                self._sampled = self._before.sampled
            self._before = InFlightStep(batch, self._forward(batch), self._device, self._kernels)
        return self._before

    @torch.inference_mode()
    def follow(self, batch: StepBatch, num_sampled: int) -> None:
        """Launch this rank's part of a step of rank 0, which sampled `num_sampled` rows before."""
        if len(self._sampled) != num_sampled:
            self._sampled = torch.zeros(num_sampled, dtype=torch.int64, device=self._device)
        with current_device(self._device):
            self._forward(batch)

    def forget_graphs(self) -> None:
        """Launch kernel by kernel from now on; call it before leaving a group of ranks."""
        if self._graphs is not None:
            self._graphs.forget()
        self._graphs = None

    def prepare(self) -> bool:
        """Capture one of the graphs that are made ahead; see `protocol.Preparing`."""
        if self._graphs is None or not self._graphs.ahead:
            return False
        with current_device(self._device):
            return self._graphs.capture_next()

    @property
    def read_once_tokens(self) -> int:
        return self._attention.read_once_tokens

    def share_prefixes(self, enabled: bool) -> bool:
        return self._attention.share_prefixes(enabled)

    def use_graphs(
        self, capture: Capture, *, max_rows: int, max_context: int, max_tokens: int
    ) -> StepGraphs | None:
        """Use graphs made by `capture` for steps that they cover, from now on.

        The limits are those of a step. Returns None, without a change, unless attention is
        Triton's.
        """
        # Imports triton, which is installed only where it is used.
        from parrot_engine.attention.triton_backend import TritonAttention
        from parrot_engine.runner.graphs import StepGraphs

        if not isinstance(self._attention, TritonAttention):
            return None
        self._graphs = StepGraphs(
            self._model,
            self._kv_cache,
            self._attention,
            capture,
            max_rows=max_rows,
            max_context=max_context,
            max_tokens=max_tokens,
            adapters=self._adapter_slots,
        )
        return self._graphs

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> Tensor:
        """Return the logits of one step for inspection, without sampling and scoring.

        The result is float32 `[num_logit_rows, vocab_size]` on the runner's device: for each row of
        the batch in order, none, the last token's, or all tokens'.
        """
        with current_device(self._device):
            return self._forward(batch).values.clone()

    def _forward(self, batch: StepBatch) -> StepLogits:
        """Return the logits of one step; valid until the next one is launched."""
        self._copy_blocks(batch.copies)
        rows = batch.rows
        if not rows:
            return StepLogits(torch.empty((0, self.vocab_size), device=self._device))
        tokens = gather_tokens(rows)
        grouped = None
        if batch.adapters and self._adapter_slots is not None:
            counts = list(map(len, BatchRows.of(rows).token_ids))
            grouped = self._adapter_slots.group(batch.adapters, counts)
        hidden, logits, largest = self._compute(rows, tokens, grouped)
        if tokens.logit_tokens is None:
            if logits is None:
                return StepLogits(self._model.logits(hidden))
            return StepLogits(logits, largest)
        if len(tokens.logit_tokens) == 0:
            return StepLogits(torch.empty((0, self.vocab_size), device=self._device))
        upload = Upload()
        needed = upload.array(tokens.logit_tokens)
        upload.send(self._device)
        if logits is not None:
            return StepLogits(logits[needed.tensor])
        return StepLogits(self._model.logits(hidden[needed.tensor]))

    def _compute(
        self, rows: Sequence[BatchRow], tokens: StepTokens, grouped: GroupedTokens | None
    ) -> Computed:
        if self._collective is not None and len(tokens.pending_at):
            self._sampled = self._collective.broadcast(self._sampled)
        if self._graphs is None:
            plan = self._attention.plan(rows)
        else:
            host = self._graphs.attention.lay_out(rows)
            computed = self._graphs.run(tokens, host, self._sampled, grouped)
            if computed is not None:
                return computed
            plan = self._graphs.attention.send(host)
        upload = Upload()
        token_ids, positions, at, pending = (
            upload.array(array)
            for array in (
                tokens.token_ids,
                tokens.positions,
                tokens.pending_at,
                tokens.pending_rows,
            )
        )
        adapters = None
        if grouped is not None:
            adapters = AdapterUpload(grouped, len(tokens.positions), upload)
        upload.send(self._device)
        if len(tokens.pending_at):
            # Insert the tokens that only the device knows.
            token_ids.tensor[at.tensor] = self._sampled[pending.tensor]
        step = token_ids.tensor, positions.tensor, self._kv_cache, self._attention, plan
        if adapters is None or self._adapter_slots is None:
            return Computed(self._model(*step), None)
        return Computed(self._adapter_slots.model(*step, adapters.rows()), None)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer, with the result of copying one after the other."""
        if not copies:
            return
        # All sources are read before any target is written, so a source that was an earlier target
        # is replaced by its origin.
        origin: dict[int, int] = {}
        for source, target in copies:
            origin[target] = origin.get(source, source)
        upload = Upload()
        targets, sources = upload.integers(list(origin)), upload.integers(list(origin.values()))
        upload.send(self._device)
        self._kv_cache[:, :, targets.tensor] = self._kv_cache[:, :, sources.tensor]
