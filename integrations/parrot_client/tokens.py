"""Counts tokens with the gateway's `/tokenize`, which has the model's own tokenizer.

Only models of the gateway's own engines have one there; for others it says so.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from typing import Any, cast

from parrot_client.connection import OpenAIClients

#: Counts that are kept; what is counted is not.
MAX_KEPT = 1024


class TokenCounter:
    """Asks one gateway; thread-safe.

    Args:
        clients: of the gateway.
        model: as the gateway knows it.
    """

    def __init__(self, clients: OpenAIClients, model: str) -> None:
        self.clients = clients
        self.model = model
        self._counts: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[TokenCounter], tuple[OpenAIClients, str]]:
        return TokenCounter, (self.clients, self.model)

    def token_ids(self, **fields: Any) -> list[int]:
        """The tokens of a `prompt`, or of `messages` as the model's chat template renders them.

        Raises:
            openai.OpenAIError: the gateway is not there, or cannot tokenize for this model.
        """
        answer = self.clients.sync().post(
            f"{self.clients.connection.root}/tokenize",
            cast_to=object,
            body={"model": self.model, **fields},
        )
        return cast("dict[str, list[int]]", answer)["tokens"]

    def count(self, **fields: Any) -> int:
        """The number of `token_ids`; the same is not asked for twice."""
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
