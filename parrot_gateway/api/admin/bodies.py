"""Bodies of the routes under `/admin/v1/models`, and their description for the OpenAPI document."""

from __future__ import annotations

from typing import Any

import msgspec

from parrot_gateway.settings.model import ModelSettings

MAX_MODEL_CHARACTERS = 1024


class ModelBody(msgspec.Struct):
    """The body of `POST /admin/v1/models/unload` and `…/cancel`."""

    model: str | None = None


class PullBody(ModelBody):
    """The body of `POST /admin/v1/models/pull`."""

    #: Answer at the end, or at once.
    wait: bool = True
    #: Answer with progress, as events.
    stream: bool = False


def _described(more: dict[str, Any]) -> dict[str, Any]:
    model = {"type": "string", "minLength": 1, "maxLength": MAX_MODEL_CHARACTERS}
    schema = {
        "type": "object",
        "required": ["model"],
        "properties": {**more, "model": model},
        "additionalProperties": False,
    }
    return {"application/json": {"schema": schema}}


_PROGRESS: dict[str, Any] = {"wait": {"type": "boolean"}, "stream": {"type": "boolean"}}
#: By path, what requests hold.
MODEL_BODIES: dict[str, dict[str, Any]] = {
    "/admin/v1/models/pull": _described(_PROGRESS),
    "/admin/v1/models/load": _described(
        {**ModelSettings.model_json_schema()["properties"], **_PROGRESS}
    ),
    "/admin/v1/models/cancel": _described({}),
    "/admin/v1/models/unload": _described({}),
}
#: Paths that can answer with events.
STREAMED_PATHS = ("/admin/v1/models/pull", "/admin/v1/models/load")
