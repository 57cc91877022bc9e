"""The objects that upstream servers keep: responses, stored completions, files, batches.

Such an object lives on the server that made it, and later requests name its id in their path or
their body. Ids are found again in the bytes of requests; nothing is rewritten.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from urllib.parse import unquote

#: Ids that are remembered; the least recently used are forgotten first.
MAX_IDS = 65_536
#: Where an answer names its own id: a stream of a response does so in its first event.
_SEARCHED_BYTES = 4096
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,128})"')
#: Fields of a body that name such objects; `id` also of a conversation.
_FIELDS = re.compile(
    rb'"(?:previous_response_id|conversation|response_id|[a-z]*_?file(?:_ids?)?|batch_id'
    rb'|container|vector_store_ids?|id)"\s*:\s*\[?\s*"([^"\\]{1,128})"'
)
#: Routes with prompts, which can be long: what they name is looked for only where something else
#: than an answer is kept.
_WITH_PROMPTS = re.compile(r"/v1/(?:chat/completions|completions|embeddings|messages(?:/.*)?)")


class StoredObjects:
    """Ids and the servers that keep the objects."""

    def __init__(self) -> None:
        self._servers: OrderedDict[str, str] = OrderedDict()
        self._knows_files = False

    def __len__(self) -> int:
        return len(self._servers)

    def server_for(self, path: str, body: bytes) -> str | None:
        """The server that keeps something that a request names; None: none is known."""
        if not self._servers:
            return None
        for segment in path.split("/")[3:]:
            server = self._find(unquote(segment))
            if server is not None:
                return server
        if not self._knows_files and _WITH_PROMPTS.fullmatch(path):
            return None
        for match in _FIELDS.finditer(body):
            server = self._find(match[1].decode("utf-8", "replace"))
            if server is not None:
                return server
        return None

    def add(self, id_: str, server: str) -> None:
        """A server keeps an object."""
        self._servers[id_] = server
        self._servers.move_to_end(id_)
        if len(self._servers) > MAX_IDS:
            self._servers.popitem(last=False)

    def read_answer(self, data: bytes, server: str, *, is_answer: bool) -> None:
        """Remember the id in the first bytes of what a server has made and keeps.

        Args:
            data: as it came.
            server: that answered.
            is_answer: it is a model's answer, not a file or the like.
        """
        found = _ID.search(data, 0, _SEARCHED_BYTES)
        if found is not None:
            self.add(found[1].decode("utf-8", "replace"), server)
            self._knows_files = self._knows_files or not is_answer

    def _find(self, id_: str) -> str | None:
        server = self._servers.get(id_)
        if server is not None:
            self._servers.move_to_end(id_)
        return server
