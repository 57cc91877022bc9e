"""The command line: `parrot-gateway serve | engine | graph | bench | simulate | doctor`."""

from parrot_gateway.cli.main import app, main

__all__ = ["app", "main"]
