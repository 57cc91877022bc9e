"""The linkers that are judged, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from parrot_bench.linking.naive import NaiveLinker
from parrot_bench.linking.score import Linker
from parrot_gateway.linking.linker.conversation import answer_of, conversation_of
from parrot_gateway.linking.linker.links import Link


class GatewayLinker:
    """The gateway's own, with its default limits."""

    def __init__(self) -> None:
        # Here, so that the command line does not wait for them, nor the gateway keeps them.
        from parrot_gateway.linking.linker.linker import Linker as CallLinker
        from parrot_gateway.linking.process.worker_process import limits_of
        from parrot_gateway.settings.model import LinkingSettings

        numbers = count()
        settings = LinkingSettings()
        self._linker = CallLinker(
            lambda: f"session-{next(numbers)}", limits_of(settings), settings.max_tenants
        )
        self._paths: dict[str, str] = {}

    def request(
        self, tenant: str, call: str, body: bytes, path: str, now: float, peer: str
    ) -> Sequence[Link]:
        conversation = conversation_of(path, body)
        self._paths[call] = path
        if conversation is None:
            return ()
        return self._linker.tenant(tenant).request(call, conversation, now, None, peer).links

    def answer(self, tenant: str, call: str, body: bytes, now: float) -> None:
        answer = answer_of(self._paths.pop(call), body)
        if answer is not None:
            self._linker.tenant(tenant).answer(call, answer, now)

    def session_of(self, tenant: str, call: str) -> str:
        session = self._linker.tenant(tenant).session_of(call)
        return call if session is None else session.id


LINKERS: dict[str, Callable[[], Linker]] = {"gateway": GatewayLinker, "naive": NaiveLinker}
