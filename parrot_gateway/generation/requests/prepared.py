"""A request that was checked against a model, before its prompt is read."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from parrot_gateway.generation.placement import ServedModel
from parrot_gateway.generation.requests.types import ChatBody, CompletionBody

if TYPE_CHECKING:
    from parrot_gateway.generation.request import GenerationRequest

_BodyT = TypeVar("_BodyT", bound=ChatBody | CompletionBody)


@dataclass(eq=False)
class PreparedCall(Generic[_BodyT]):
    """A request whose fields were checked against a model; base of one class for each kind.

    Args:
        request: typed.
        served: the model.
        size: bytes of the request's body, as a measure.
    """

    request: _BodyT
    served: ServedModel
    size: int

    @property
    def uses_tools(self) -> bool:
        """Whether the model may call tools."""
        return False

    def rebound(self, request: _BodyT, served: ServedModel, size: int) -> Self | None:
        """The same call with other texts in its prompt; None where it was checked for another
        model, and has to be prepared anew."""
        if served.info != self.served.info:
            return None
        if request is self.request:
            return self
        again = copy(self)
        again.request, again.size = request, size
        again.forget_prompt()
        return again

    def forget_prompt(self) -> None:
        """The prompt is to be read anew."""
        raise NotImplementedError

    async def generation_request(self, salt: str) -> GenerationRequest:
        """The request for an engine, the prompt tokenized whole.

        Args:
            salt: prefixes are shared only under the same one.

        Raises:
            ContextLengthError: it does not fit the model's context.
            InvalidRequestError: it cannot be a prompt.
        """
        raise NotImplementedError

    async def check_fits(self) -> None:
        """Check the length of a prompt that is final; raises as `generation_request`."""
        limit = self.served.info.max_context_tokens
        # No token is shorter than a byte, so most requests can be seen to fit.
        requested = max(
            self.request.max_tokens or 0, getattr(self.request, "max_completion_tokens", None) or 0
        )
        if self.size + requested > limit:
            await self.generation_request("")
