"""Finds the way of continuing a chat's answer that a server takes: set, known by host, or learned.

Pure but for what it remembers: a server that refuses a way for a model is not asked again.
"""

from __future__ import annotations

from collections import OrderedDict

from yarl import URL

from parrot_gateway.backends.upstreams.continuation import ContinuationStyle
from parrot_gateway.settings.model import UpstreamSettings

#: By the end of the host's name; None: an answer cannot be continued there.
KNOWN_HOSTS: dict[str, ContinuationStyle | None] = {
    "openai.com": None,
    "openai.azure.com": None,
    "googleapis.com": None,
    "anthropic.com": "prefill",
    "openrouter.ai": "prefill",
    "mistral.ai": "prefix",
    "deepseek.com": "prefix",
}
#: Statuses by which servers refuse a request that they do not understand.
REFUSALS = (400, 422)
_MAX_REFUSED = 1024


class ContinuationStyles:
    """Knows and learns the styles of one upstream.

    Args:
        settings: of the upstream.
    """

    def __init__(self, settings: UpstreamSettings) -> None:
        self._settings = settings
        #: Models that have refused, oldest first.
        self._refused: OrderedDict[str, None] = OrderedDict()

    def style_for(self, model: str) -> ContinuationStyle | None:
        """How a chat with `model` is continued there; None: it cannot be."""
        setting = self._settings.continuation
        if setting == "none" or model in self._refused:
            return None
        if setting != "auto":
            return setting
        host = URL(next(iter(self._settings.servers.values()))).host or ""
        for known, style in KNOWN_HOSTS.items():
            if host == known or host.endswith("." + known):
                return style
        return "continue_final_message"

    def refused(self, model: str) -> None:
        """The upstream does not continue chats with this model."""
        self._refused[model] = None
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
