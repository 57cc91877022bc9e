"""The adapters of one model: all in host memory, those in use in slots on the device.

All adapters of a step need slots at once, so a step has at most as many adapters as there are
slots. Other adapters lose theirs, least recently used first. Writing a slot is ordered before the
step that needs it and after all steps launched earlier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from parrot_engine.adapters.reader import Adapter, AdapterReader, Product
from parrot_engine.exceptions import EngineStateError
from parrot_engine.models.decoder import Decoder
from parrot_engine.models.lora import GroupedTokens, LoraSlots
from parrot_engine.models.parts import Linear
from parrot_engine.models.sharding import Shard


class AdapterSlots:
    """Adds slots for adapters to all products of a model's layers.

    Args:
        model: gets slots on its products.
        count: maximum adapters of one step.
        max_rank: maximum rank of an adapter.
        device, dtype: the model's.
        whole: the model of which `model` is a part, and the part; it needs no memory.
    """

    def __init__(
        self,
        model: Decoder,
        count: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        whole: tuple[Decoder, Shard] | None = None,
    ) -> None:
        self.model = model
        self.count = count
        self.max_rank = max_rank
        self._device = device
        #: By path of a product.
        self._slots: dict[str, LoraSlots] = {}
        for path, module in _products(model):
            self._slots[path] = module.make_lora_slots(count, max_rank, device, dtype)
        products = _shapes(model)
        if whole is None:
            self._reader = AdapterReader(products, model.config, dtype, max_rank)
        else:
            origin, shard = whole
            self._reader = AdapterReader(
                _shapes(origin), model.config, dtype, max_rank, (products, shard)
            )
        self._adapters: dict[str, Adapter] = {}
        #: Slots by adapter, least recently used first.
        self._slot_of: OrderedDict[str, int] = OrderedDict()
        #: Number of adapters copied into slots.
        self.num_writes = 0

    def read(self, folder: Path) -> Adapter:
        """Read the adapter in `folder` for `add`; from any thread.

        Raises:
            AdapterError: see `AdapterReader.read`.
        """
        adapter = self._reader.read(folder)
        if self._device.type != "cuda":
            return adapter
        # Only copies from pinned memory run concurrently with the host.
        with torch.cuda.device(self._device):
            weights = {
                path: [None if pair is None else (pair[0].pin_memory(), pair[1].pin_memory())
                       for pair in pairs]
                for path, pairs in adapter.weights.items()
            }  # fmt: skip
        return adapter._replace(weights=weights)

    def add(self, adapter: Adapter) -> None:
        """Keep an adapter; rows may name it from now on."""
        self._adapters.setdefault(adapter.id, adapter)

    def remove(self, adapter_id: str) -> None:
        """Forget an adapter that no further row names. Launched steps are not affected."""
        self._adapters.pop(adapter_id, None)
        self._slot_of.pop(adapter_id, None)

    def group(self, adapter_ids: Sequence[str], counts: Sequence[int]) -> GroupedTokens:
        """Group the tokens of a step by slot, after putting its adapters into slots.

        Args:
            adapter_ids: one per row; empty for none.
            counts: number of tokens per row.

        Raises:
            EngineStateError: more adapters than slots, or an unknown one.
        """
        wanted = {adapter_id for adapter_id in adapter_ids if adapter_id}
        if len(wanted) > self.count or not wanted <= self._adapters.keys():
            raise EngineStateError("adapters", f"a step names {sorted(wanted)}")
        for adapter_id in wanted & self._slot_of.keys():
            self._slot_of.move_to_end(adapter_id)
        for adapter_id in sorted(wanted - self._slot_of.keys()):
            self._write(self._adapters[adapter_id])
        slots = [self._slot_of[adapter_id] if adapter_id else -1 for adapter_id in adapter_ids]
        return GroupedTokens.of(slots, counts)

    def _write(self, adapter: Adapter) -> None:
        used = set(self._slot_of.values())
        slot = next((slot for slot in range(self.count) if slot not in used), None)
        if slot is None:
            _, slot = self._slot_of.popitem(last=False)
        for path, slots in self._slots.items():
            slots.write(slot, adapter.weights.get(path) or [None] * len(slots.sizes))
        self._slot_of[adapter.id] = slot
        self.num_writes += 1


def _products(model: Decoder) -> Iterator[tuple[str, Linear]]:
    """Yield the products that adapters can change, by path."""
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module is not model.lm_head:
            yield path, module


def _shapes(model: Decoder) -> dict[str, Product]:
    return {
        path: Product(module.parts, module.weight.shape[1]) for path, module in _products(model)
    }
