"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them."""

from __future__ import annotations

import re

from parrot_gateway.api.admin.bodies import MAX_BODY_BYTES, LoadAdapterBody, UnloadAdapterBody
from parrot_gateway.backends.own.adapters import AdapterService
from parrot_gateway.calls.requests.call import BodyDecoder
from parrot_gateway.exceptions import InvalidRequestError, invalid_value
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.http.route_table import route

_PATH = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]+")
_NAME = re.compile(rf"(?! ){_PATH.pattern}(?<! )")
_MAX_NAME_CHARACTERS = 256
_MAX_PATH_CHARACTERS = 4096
_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]


_load_decoder = BodyDecoder(LoadAdapterBody)
_unload_decoder = BodyDecoder(UnloadAdapterBody)


class AdapterRoutes:
    """The routes; behind the operator's key.

    Args:
        adapters: loads and unloads them.
    """

    def __init__(self, adapters: AdapterService) -> None:
        self._adapters = adapters

    @route("POST", "/v1/load_lora_adapter")
    async def load(self, exchange: Exchange) -> None:
        """Load a LoRA adapter on all engines of its model."""
        given, _ = _load_decoder.decode(await exchange.body(MAX_BODY_BYTES))
        if not given.lora_name or not given.lora_path:
            raise InvalidRequestError(
                "Both 'lora_name' and 'lora_path' must be provided.",
                param="lora_path" if given.lora_name else "lora_name",
            )
        if len(given.lora_name) > _MAX_NAME_CHARACTERS or not _NAME.fullmatch(given.lora_name):
            raise invalid_value(
                "lora_name",
                f"{_MAX_NAME_CHARACTERS} characters at most, no control characters, and no blanks "
                "at its ends.",
            )
        if len(given.lora_path) > _MAX_PATH_CHARACTERS or not _PATH.fullmatch(given.lora_path):
            raise invalid_value("lora_path", "it is too long, or holds control characters.")
        await self._adapters.load(
            given.lora_name, given.lora_path, base=given.base_model, in_place=given.load_inplace
        )
        text = f"Success: LoRA adapter '{given.lora_name}' added successfully."
        await exchange.respond(200, text.encode(), _TEXT)

    @route("POST", "/v1/unload_lora_adapter")
    async def unload(self, exchange: Exchange) -> None:
        """Unload a LoRA adapter; calls that run with it end as they would."""
        given, _ = _unload_decoder.decode(await exchange.body(MAX_BODY_BYTES))
        if not given.lora_name:
            raise InvalidRequestError(
                "'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name"
            )
        await self._adapters.unload(given.lora_name)
        text = f"Success: LoRA adapter '{given.lora_name}' removed successfully."
        await exchange.respond(200, text.encode(), _TEXT)
