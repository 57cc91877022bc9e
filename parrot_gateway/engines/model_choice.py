"""Which model runs a call that leaves it open, or allows several.

Decides by names alone; which engine of that model takes the call is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from parrot_gateway.engines.catalog import EngineTarget, Target
from parrot_gateway.exceptions import (
    GatewayError,
    InvalidRequestError,
    ModelLoadingError,
    ModelNotFoundError,
)

#: What Parrot's API calls models of own engines, and those behind an API of texts.
ModelType: TypeAlias = Literal["token_id", "text"]
MODEL_TYPES: tuple[ModelType, ...] = ("token_id", "text")


class ChosenModel(NamedTuple):
    """A model, and whether engines of our own run it."""

    name: str
    is_own: bool


def choose_model(
    allowed: Sequence[str],
    model_type: ModelType,
    *,
    resolve: Callable[[str], Target],
    own: Sequence[str],
    listed: Sequence[str],
) -> ChosenModel:
    """The first allowed model that is served here; the default when none is named.

    The default is the first model of the kind that `model_type` prefers, else the first of the
    other kind.

    Args:
        allowed: an allow-list; empty for any model.
        resolve: says who serves a name, as `Catalog.resolve`.
        own, listed: models of own engines, and those that upstreams list.

    Raises:
        ModelNotFoundError: none of those allowed is served.
        ModelLoadingError: none so far, but that may change.
        InvalidRequestError: no default can be told.
    """
    if allowed:
        return _first_served(allowed, resolve)
    ordered = [*own, *listed] if model_type == "token_id" else [*listed, *own]
    if not ordered:
        raise InvalidRequestError(
            "No model is listed here that could be taken by default; name one in 'models'.",
            param="models",
            code="model_required",
        )
    return ChosenModel(ordered[0], isinstance(resolve(ordered[0]), EngineTarget))


def _first_served(allowed: Sequence[str], resolve: Callable[[str], Target]) -> ChosenModel:
    loading: ModelLoadingError | None = None
    for name in allowed:
        try:
            return ChosenModel(name, isinstance(resolve(name), EngineTarget))
        except ModelLoadingError as error:
            loading = loading or error
        except GatewayError:
            continue
    if loading is not None:
        raise loading
    shown = ", ".join(f"'{name[:64]}'" for name in allowed[:8])
    more = ", …" if len(allowed) > 8 else ""
    raise ModelNotFoundError(f"None of the models {shown}{more} is served here.", param="models")
