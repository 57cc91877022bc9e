"""Bodies of the admin routes, and their description for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from parrot_gateway.calls.requests.call import BodyDecoder
from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.settings.model import ModelSettings

MAX_BODY_BYTES = 64 * 1024
MAX_MODEL_CHARACTERS = 1024
_MAX_REFUSE_AFTER_S = 86_400.0


class ModelBody(msgspec.Struct):
    """The body of `POST /admin/v1/models/unload` and `…/cancel`."""

    model: str | None = None


class PullBody(ModelBody):
    """The body of `POST /admin/v1/models/pull`."""

    #: Answer at the end, or at once.
    wait: bool = True
    #: Answer with progress, as events.
    stream: bool = False


class DrainBody(msgspec.Struct):
    """The body of `POST /admin/v1/drain`."""

    #: Calls are answered for so long after readiness is gone; None: for as long as they come.
    refuse_after_s: Annotated[float, msgspec.Meta(ge=0, le=_MAX_REFUSE_AFTER_S)] | None = 30.0


class LoadAdapterBody(msgspec.Struct):
    """The body of `POST /v1/load_lora_adapter`."""

    lora_name: str | None = None
    lora_path: str | None = None
    #: It may take the place of an adapter of this name.
    load_inplace: bool = False
    #: The model that it belongs to, where several take adapters.
    base_model: str | None = None


class UnloadAdapterBody(msgspec.Struct):
    """The body of `POST /v1/unload_lora_adapter`."""

    lora_name: str | None = None
    #: vLLM's own number of it, which means nothing here.
    lora_int_id: int | None = None


async def read(exchange: Exchange, decoder: BodyDecoder[Any]) -> Any:
    """The body of a request, all of whose fields are known; an empty one has none."""
    given, unknown = decoder.decode(await exchange.body(MAX_BODY_BYTES) or b"{}")
    if unknown:
        raise unknown_field(unknown[0])
    return given


def unknown_field(name: str) -> InvalidRequestError:
    """A body has a field that there is not."""
    return InvalidRequestError(
        f"Unrecognized request argument supplied: {name[:80]}",
        param=name[:80],
        code="unknown_parameter",
    )


def _described(more: dict[str, Any]) -> dict[str, Any]:
    model = {"type": "string", "minLength": 1, "maxLength": MAX_MODEL_CHARACTERS}
    schema = {
        "type": "object",
        "required": ["model"],
        "properties": {**more, "model": model},
        "additionalProperties": False,
    }
    return {"application/json": {"schema": schema}}


def _with_fields(*required: str, **fields: Any) -> dict[str, Any]:
    schema = {"type": "object", "required": list(required), "properties": fields}
    return {"application/json": {"schema": schema}}


_TEXT = {"type": "string", "minLength": 1}
_PROGRESS: dict[str, Any] = {"wait": {"type": "boolean"}, "stream": {"type": "boolean"}}
#: By path, what requests hold.
ADMIN_BODIES: dict[str, dict[str, Any]] = {
    "/admin/v1/drain": _with_fields(
        refuse_after_s={"type": ["number", "null"], "minimum": 0, "maximum": _MAX_REFUSE_AFTER_S}
    ),
    "/admin/v1/models/pull": _described(_PROGRESS),
    "/admin/v1/models/load": _described(
        {**ModelSettings.model_json_schema()["properties"], **_PROGRESS}
    ),
    "/admin/v1/models/cancel": _described({}),
    "/admin/v1/models/unload": _described({}),
    "/v1/load_lora_adapter": _with_fields(
        "lora_name",
        "lora_path",
        lora_name=_TEXT,
        lora_path=_TEXT,
        load_inplace={"type": "boolean"},
        base_model={"type": ["string", "null"]},
    ),
    "/v1/unload_lora_adapter": _with_fields(
        "lora_name", lora_name=_TEXT, lora_int_id={"type": ["integer", "null"]}
    ),
}
#: Paths that can answer with events.
STREAMED_PATHS = ("/admin/v1/models/pull", "/admin/v1/models/load")
