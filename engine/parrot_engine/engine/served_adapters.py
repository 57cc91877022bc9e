"""The adapters that an engine serves, by name, and those that only old contexts still use."""

from __future__ import annotations

from typing import NamedTuple

from parrot_engine.batch import Adapter, AdapterMemory
from parrot_engine.engine.context_store import ContextStore
from parrot_engine.protocol import AdapterInfo


class ReadAdapter(NamedTuple):
    """An adapter that was read and checked, and is not served yet."""

    name: str
    path: str
    adapter: Adapter


class ServedAdapters:
    """The adapters that new contexts may name.

    An adapter that is removed, or whose name another one gets, stays in memory as long as contexts
    use it.
    """

    def __init__(self, store: ContextStore, memory: AdapterMemory) -> None:
        self._store = store
        self.memory = memory
        #: By name.
        self.infos: dict[str, AdapterInfo] = {}
        self._retired: set[str] = set()

    def add(self, read: ReadAdapter) -> None:
        """Serve an adapter under its name, in the place of another one."""
        name, path, adapter = read
        self.memory.add(adapter)
        self.infos[name] = AdapterInfo(name, adapter.id, path, adapter.rank)
        self._changed()

    def remove(self, name: str) -> None:
        """Serve no new contexts under a name; an unknown one does nothing."""
        self.infos.pop(name, None)
        self._changed()

    def _changed(self) -> None:
        served = {info.id for info in self.infos.values()}
        self._retired = (self._retired | self._store.adapters) - served
        self._store.adapters = served
        self.release()

    def release(self) -> None:
        """Forget retired adapters that no context uses any more."""
        uses = self._store.states.adapter_uses
        for adapter_id in [each for each in self._retired if not uses[each]]:
            self._retired.remove(adapter_id)
            self.memory.remove(adapter_id)
            del uses[adapter_id]
