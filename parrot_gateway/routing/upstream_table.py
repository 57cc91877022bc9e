"""The upstreams by name, and their exchange for others while calls run.

An upstream whose settings and key are the same stays what it is. One that is replaced or removed
still answers the calls that have begun with it, and is closed once the last of them must have
ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.routing.fleet.fleet import UpstreamFleet
from parrot_gateway.settings.model import UpstreamSettings

logger = logging.getLogger(__name__)

AnyUpstream: TypeAlias = Upstream | UpstreamFleet

#: How long a start or an exchange waits for an upstream that does not answer.
LISTING_WAIT_S = 3.0
#: Replaced upstreams that are kept for their last calls; the oldest is closed first.
_MAX_RETIRED = 64


class UpstreamTable(dict[str, AnyUpstream]):
    """Upstreams by name, in the order of the settings.

    Looking up the name of one that was removed finds it until it is closed, for calls that had
    chosen it before; it is not listed any more.

    Args:
        settings: of the first ones.
        make: makes one of its settings.
    """

    def __init__(
        self, settings: Iterable[UpstreamSettings], make: Callable[[UpstreamSettings], AnyUpstream]
    ) -> None:
        super().__init__({item.name: make(item) for item in settings})
        self._make = make
        self._retired: dict[AnyUpstream, asyncio.Task[None]] = {}

    def __missing__(self, name: str) -> AnyUpstream:
        for upstream in reversed(self._retired):
            if upstream.name == name:
                return upstream
        raise KeyError(name)

    async def start(self) -> None:
        """Open connections; does not wait for answers."""
        for upstream in list(self.values()):
            await upstream.start()

    async def wait_ready(self) -> None:
        """Return once each has listed its models, or has had its time to."""
        await asyncio.gather(*(_listed(upstream) for upstream in self.values()))

    async def prepare(self, settings: Iterable[UpstreamSettings]) -> dict[str, AnyUpstream]:
        """The upstreams that the table shall hold from the exchange on. New ones know their models,
        if they answer in time. Nothing has changed yet.

        Raises:
            ConfigError: the key of one cannot be read.
        """
        found: dict[str, AnyUpstream] = {}
        try:
            for item in settings:
                old = self.get(item.name)
                is_same = old is not None and old.settings == item and old.has_present_key()
                found[item.name] = old if old is not None and is_same else self._make(item)
            new = self._only_in(found)
            for upstream in new:
                await upstream.open()
            await asyncio.gather(*(_listed(upstream) for upstream in new))
        except BaseException:
            for upstream in self._only_in(found):
                await upstream.close()
            raise
        return found

    def exchange(self, prepared: Mapping[str, AnyUpstream], retire_after_s: float) -> None:
        """Hold what was prepared, from now on.

        Args:
            prepared: by `prepare`.
            retire_after_s: when the last call of those that are gone must have ended.
        """
        old = [each for each in self.values() if prepared.get(each.name) is not each]
        new = self._only_in(prepared)
        for upstream in self._retired:
            if isinstance(upstream, UpstreamFleet) and upstream.name in prepared:
                upstream.leave()
        for upstream in old:
            successor = prepared.get(upstream.name)
            if successor is not None:
                successor.succeed(upstream)
            waiting = [task for task in self._retired.values() if not task.cancelling()]
            if len(waiting) >= _MAX_RETIRED:
                waiting[0].cancel()
            retiring = asyncio.create_task(
                self._retire(upstream, retire_after_s), name=f"retire-{upstream.name}"
            )
            self._retired[upstream] = retiring
        self.clear()
        self.update(prepared)
        for upstream in new:
            upstream.join()

    async def close(self) -> None:
        """Abort what is in flight and close all connections, of retired ones too."""
        retiring = list(self._retired.values())
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        # One whose task had not begun is still among the retired.
        for upstream in [*self._retired, *self.values()]:
            await upstream.close()

    def _only_in(self, prepared: Mapping[str, AnyUpstream]) -> list[AnyUpstream]:
        return [each for each in prepared.values() if self.get(each.name) is not each]

    async def _retire(self, upstream: AnyUpstream, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
        finally:
            self._retired.pop(upstream, None)
            await upstream.close()


async def _listed(upstream: AnyUpstream) -> None:
    try:
        async with asyncio.timeout(LISTING_WAIT_S):
            await upstream.wait_ready()
    except TimeoutError:
        logger.warning(
            "upstream '%s' has not listed its models yet; its calls will be tried", upstream.name
        )
