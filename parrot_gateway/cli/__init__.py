"""The command line: `parrot-gateway serve | engine | models | bench | simulate | doctor | …`."""

from parrot_gateway.cli.main import app, main

__all__ = ["app", "main"]
