"""Secrets are never values in settings, but references to environment variables: `env:NAME`."""

from __future__ import annotations

import os
import re
from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from parrot_gateway.settings.config_file import ConfigError


def _check_secret_reference(value: str) -> str:
    if not re.fullmatch(r"env:[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError(
            "a secret is given as env:NAME, the name of the environment variable that holds it "
            "(secrets on command lines and in files are read by others)"
        )
    return value


#: `env:NAME`: where a secret is found, not the secret.
SecretReference: TypeAlias = Annotated[str, AfterValidator(_check_secret_reference)]


def read_secret(reference: str) -> str:
    """The value behind `env:NAME`.

    Raises:
        ConfigError: the variable is not set or empty.
    """
    name = reference.removeprefix("env:")
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"The environment variable {name} is not set, but {reference} needs it.")
    return value
