"""Fields of a request that mean nothing to an own engine: named in the answer, and in the log once.

Such a field is accepted, as OpenAI-compatible servers do, and may be a typing error or another
server's extension. Only names are shown, never values.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence

from parrot_gateway.http.exchange import Exchange, Headers

logger = logging.getLogger(__name__)

#: Names in one header, and characters of a name.
MAX_NAMES = 16
MAX_NAME_CHARACTERS = 48
#: Names that are logged in the life of the process: clients make them up.
MAX_LOGGED = 256

_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.:/-]")

_logged: set[tuple[str, str]] = set()


def name_ignored(exchange: Exchange, names: Sequence[str]) -> None:
    """Let the answer of `exchange` name the fields in `x-parrot-ignored`.

    Args:
        names: as the body has them; nothing happens where there are none.
    """
    if not names:
        return
    shown = [_plain(name) for name in names[:MAX_NAMES]]
    _log(exchange.path, shown)
    if len(names) > MAX_NAMES:
        shown.append("...")
    value = ", ".join(shown).encode()

    def add(headers: Headers) -> None:
        # A call that falls back is read twice.
        if not any(name == b"x-parrot-ignored" for name, _ in headers):
            headers.append((b"x-parrot-ignored", value))

    exchange.on_headers(add)


def _plain(name: str) -> str:
    text = _UNPRINTABLE.sub("?", name[:MAX_NAME_CHARACTERS])
    return f"{text}..." if len(name) > MAX_NAME_CHARACTERS else text


def _log(path: str, names: Iterable[str]) -> None:
    for name in names:
        if (path, name) not in _logged and len(_logged) < MAX_LOGGED:
            _logged.add((path, name))
            logger.info("%s: the field '%s' has no meaning here; ignored", path, name)
