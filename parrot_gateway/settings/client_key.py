"""The key with which our own commands call a gateway: `--api-key env:NAME`, or its usual place."""

from __future__ import annotations

import os

from parrot_gateway.settings.config_file import ConfigError
from parrot_gateway.settings.secret_reference import read_secret


def key_of_option(reference: str) -> str:
    """The key behind `env:NAME`.

    Raises:
        ConfigError: the variable is not set, or something else than `env:NAME` was given (which
            is not repeated: it may be the key).
    """
    if not reference.startswith("env:"):
        raise ConfigError(
            "--api-key takes env:NAME, the name of the environment variable that holds the key "
            "(secrets on command lines are read by others)."
        )
    return read_secret(reference)


def usual_key(base_url: str | None) -> str | None:
    """The key in its usual places. OpenAI's own is sent only to where its variables point.

    Args:
        base_url: as given on the command line, if it was.
    """
    if os.environ.get("PARROT_API_KEY"):
        return os.environ["PARROT_API_KEY"]
    if base_url is None and os.environ.get("OPENAI_BASE_URL"):
        return os.environ.get("OPENAI_API_KEY") or None
    return None
