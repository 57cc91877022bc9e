"""Parrot Gateway: an OpenAI-compatible gateway that sees the application behind the calls."""

__version__ = "0.1.0"
