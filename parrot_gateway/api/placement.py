"""The engines of a model, as the call of one exchange sees them."""

from __future__ import annotations

from parrot_gateway.engines.remote import RemoteEngine
from parrot_gateway.generation.placement import Placer
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.server.gateway import Gateway


def placer_for(exchange: Exchange, gateway: Gateway, model: str) -> Placer:
    """Where the call of `exchange` may run; the exchange learns of its engine.

    Raises:
        ModelLoadingError: no engine of the model is ready yet.
        OverloadedError: its engines could not be started.
    """

    def note_placement(engine: RemoteEngine, waited_s: float, why: str) -> None:
        exchange.engine = engine.name
        exchange.queued_s = waited_s
        exchange.placement = why

    return gateway.placer(model, exchange.metadata, note_placement)
