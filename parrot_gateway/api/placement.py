"""The engines of a model, as the call of one exchange sees them."""

from __future__ import annotations

from parrot_gateway.engines.remote import RemoteEngine
from parrot_gateway.generation.placing import ModelSeats
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.server.gateway import Gateway


def seats_for(exchange: Exchange, gateway: Gateway, model: str) -> ModelSeats:
    """Where the call of `exchange` may run; the exchange learns of its engine.

    Raises:
        ModelLoadingError: no engine of the model is ready yet.
        OverloadedError: its engines could not be started.
    """

    def seated(engine: RemoteEngine, waited_s: float, why: str) -> None:
        exchange.engine = engine.name
        exchange.queued_s = waited_s
        exchange.placement = why

    return gateway.seats(model, exchange.purpose, seated)
