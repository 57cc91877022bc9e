"""Counts tokens with the gateway's `/tokenize`, which has the model's own tokenizer.

Only models of the gateway's own engines have one there; for others it raises an error.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from typing import Any, cast

from parrot_client.connection import OpenAIClients

#: Maximum counts kept; the counted texts are not.
MAX_KEPT = 1024


class TokenCounter:
    """Asks one gateway for token counts; thread-safe.

    Args:
        clients: clients of the gateway.
        model: the gateway's name of the model.
    """

    def __init__(self, clients: OpenAIClients, model: str) -> None:
        self.clients = clients
        self.model = model
        self._counts: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[TokenCounter], tuple[OpenAIClients, str]]:
        return TokenCounter, (self.clients, self.model)

    def token_ids(self, **fields: Any) -> list[int]:
        """Return the tokens of a `prompt`, or of `messages` rendered with the model's chat
        template.

        Raises:
            openai.OpenAIError: the gateway cannot be reached, or cannot tokenize for this model.
        """
        answer = self.clients.sync().post(
            f"{self.clients.connection.root}/tokenize",
            cast_to=object,
            body={"model": self.model, **fields},
        )
        return cast("dict[str, list[int]]", answer)["tokens"]

    def count(self, **fields: Any) -> int:
        """Return the number of tokens; equal requests are sent once."""
        key = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).digest()
        with self._lock:
            if key in self._counts:
                self._counts.move_to_end(key)
                return self._counts[key]
        found = len(self.token_ids(**fields))
        with self._lock:
            self._counts[key] = found
            while len(self._counts) > MAX_KEPT:
                self._counts.popitem(last=False)
        return found
