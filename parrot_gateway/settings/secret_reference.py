"""Secrets in settings are references, never values: `env:NAME`, a variable, or `file:/PATH`.

Commands also find the gateway's key here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from parrot_gateway.settings.config_file import ConfigError


def _check_secret_reference(value: str) -> str:
    if not re.fullmatch(r"env:[A-Za-z_][A-Za-z0-9_]*|file:/[^\x00-\x1f]+", value):
        raise ValueError(
            "a secret is given as env:NAME, the name of the environment variable that holds it, or "
            "as file:/PATH (secrets on command lines and in settings files are read by others)"
        )
    return value


_FILE = "file:"
_MAX_FILE_BYTES = 65536

#: Replaces credentials in a displayed URL.
HIDDEN = "***@"

#: `env:NAME` or `file:/PATH`: the location of a secret.
SecretReference: TypeAlias = Annotated[str, AfterValidator(_check_secret_reference)]


def read_secret(reference: str) -> str:
    """Read the value behind `env:NAME`, or the one line in the file of `file:/PATH`.

    Raises:
        ConfigError: the variable is not set or empty, or the file cannot be read or is no key.
    """
    if reference.startswith(_FILE):
        return _read_file(reference.removeprefix(_FILE))
    name = reference.removeprefix("env:")
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"The environment variable {name} is not set, but {reference} needs it.")
    return value


def _read_file(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            value = file.read(_MAX_FILE_BYTES + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{_FILE}{path} cannot be read: {reason}.") from None
    if not value or len(value) > _MAX_FILE_BYTES or not value.isprintable():
        raise ConfigError(f"{_FILE}{path}: expected one line with the key.")
    return value


def without_credentials(url: str, sign: str = "") -> str:
    """Return a URL for display, with `sign` in place of user name and password."""
    return re.sub(r"^(\w+://)[^/?#]*@", rf"\1{sign}", url)


def key_of_option(reference: str, option: str = "--api-key") -> str:
    """Read the key behind `env:NAME` or `file:/PATH`, given as a command's option.

    Raises:
        ConfigError: there is no key, or the option is no reference (it is not
            repeated, because it may be the key).
    """
    if not reference.startswith(("env:", _FILE)):
        raise ConfigError(
            f"{option} takes env:NAME, the name of the environment variable that holds the key "
            "(secrets on command lines are read by others)."
        )
    return read_secret(reference)


def usual_key(base_url: str | None) -> str | None:
    """Return the key from its usual places. OpenAI's own key is sent only where its variables
    point.

    Args:
        base_url: as given on the command line, if it was.
    """
    if os.environ.get("PARROT_API_KEY"):
        return os.environ["PARROT_API_KEY"]
    if base_url is None and os.environ.get("OPENAI_BASE_URL"):
        return os.environ.get("OPENAI_API_KEY") or None
    return None
