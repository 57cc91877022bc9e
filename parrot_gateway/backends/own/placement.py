"""The interface through which a call gets an engine.

The scheduler decides which engine it becomes, behind `parrot_gateway.routing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from parrot_gateway.calls.metadata import ServedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parrot_engine.protocol import Retention

    from parrot_gateway.backends.own.remote import RemoteEngine
    from parrot_gateway.calls.generation_request import GenerationRequest
    from parrot_gateway.exceptions import OverloadedError


class Placement(Protocol):
    """A call's place on an engine, or its wait for one; `close` it when the call has ended."""

    @property
    def priority(self) -> int:
        """For the engine's own queue, once taken: smaller runs earlier."""

    @property
    def adapter(self) -> str:
        """Id of the adapter that it is computed with; empty for none."""

    @property
    def retention(self) -> Retention:
        """How its KV is retained when it has ended, once taken."""

    @property
    def application(self) -> str:
        """Whose call it is, for what is kept of its KV."""

    async def engine(self) -> RemoteEngine:
        """The engine, as soon as there is a place. A cancelled wait can be taken up again.

        Raises:
            OverloadedError: there is too much to do, or no engine any more.
            ContextLengthError: no engine of the model can hold it.
        """

    @property
    def engine_name(self) -> str:
        """The engine's own name, once there is one."""

    @property
    def queued_s(self) -> float:
        """Seconds that the call waited for it."""

    @property
    def reason(self) -> str:
        """Why it is this engine, in a few words."""

    def progress(self, *, filled: int, cached: int, generated: int) -> None:
        """Tokens so far: of the prompts, of these found in a cache, and of the answers."""

    def succeed(self) -> None:
        """The call has all its tokens; anything else that ends it was no success."""

    def close(self) -> None:
        """The call has ended, and its contexts are freed. Safe to call twice."""


class Placer(ServedModel, Protocol):
    """The engines of one model, as a call sees them before it has one."""

    def place(self, request: GenerationRequest, lost: Sequence[str] = ()) -> Placement:
        """Ask for a place for a call; must be closed.

        Args:
            request: the call, or what is left of it.
            lost: names of the engines that it has lost.
        """

    def draw_seed(self) -> int:
        """A seed for a call that gives none."""

    async def engine_coming(self, lost: OverloadedError) -> None:
        """Return once an engine of the model takes calls, after one was lost.

        Raises:
            OverloadedError: there will be none: `lost`; or there is none for too long.
        """
