"""`/admin/v1/models`: the models of own engines, listed, downloaded, loaded and unloaded."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from parrot_gateway.api.admin.bodies import (
    MAX_BODY_BYTES,
    MAX_MODEL_CHARACTERS,
    ModelBody,
    PullBody,
    read,
    unknown_field,
)
from parrot_gateway.api.event_stream import DONE, EventStream, data_event
from parrot_gateway.backends.own.changes import Changes, wait_for_change
from parrot_gateway.backends.own.model_manager import ModelManager
from parrot_gateway.calls.requests.call import BodyDecoder, decode
from parrot_gateway.exceptions import (
    ConflictError,
    ForbiddenError,
    GatewayError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    invalid_value,
    missing_parameter,
    wrong_type,
)
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.http.route_table import route
from parrot_gateway.settings import DEMO_MODEL
from parrot_gateway.settings.model import EngineLinkSettings, ModelSettings, ServerSettings

#: Between two events of a stream, at least.
_PAUSE_S = 0.1
_MAX_NAME_CHARACTERS = 256

#: As the hub allows them: `name` or `owner/name`.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_NAME = re.compile(r"[^\x00-\x20\x7f](?:[^\x00-\x1f\x7f]*[^\x00-\x20\x7f])?")


_model_decoder = BodyDecoder(ModelBody)
_pull_decoder = BodyDecoder(PullBody)
_load_decoder = msgspec.json.Decoder(dict[str, Any])


class ModelRoutes:
    """The routes under `/admin/v1/models`.

    Args:
        manager: of the models.
        engines: what may be loaded.
        server: of streams, when a comment is due.
    """

    def __init__(
        self, manager: ModelManager, engines: EngineLinkSettings, server: ServerSettings
    ) -> None:
        self.manager = manager
        self.engines = engines
        self.keep_alive_s = server.keep_alive_s

    @route("GET", "/admin/v1/models")
    async def list(self, exchange: Exchange) -> None:
        """List the models of own engines, with their states, and downloads."""
        downloads = [each.describe() for each in self.manager.downloads.all.values()]
        await exchange.respond_json(
            {"object": "list", "data": self.manager.describe(), "downloads": downloads}
        )

    @route("GET", "/admin/v1/models/{model}")
    async def get(self, exchange: Exchange, model: str) -> None:
        """Describe a model of own engines."""
        await exchange.respond_json(self.manager.find(model))

    @route("GET", "/admin/v1/models/{owner}/{name}")
    async def get_of_owner(self, exchange: Exchange, owner: str, name: str) -> None:
        """Describe a model of own engines whose name has a slash in it."""
        await exchange.respond_json(self.manager.find(f"{owner}/{name}"))

    @route("POST", "/admin/v1/models/pull")
    async def pull(self, exchange: Exchange) -> None:
        """Download a model from the Hugging Face hub."""
        given = await read(exchange, _pull_decoder)
        model = _model_of(given)
        self._check_hub_id(model)
        downloads = self.manager.downloads
        if downloads.is_full:
            raise OverloadedError("Too many downloads wait already.", retry_after_s=30.0)
        download = downloads.start(model)
        work = asyncio.create_task(download.ended(), name=f"pulled-{model}")
        try:
            await self._answer(
                exchange,
                work,
                download.describe,
                [downloads.changes],
                wait=given.wait,
                stream=given.stream,
            )
        finally:
            work.cancel()

    @route("POST", "/admin/v1/models/cancel")
    async def cancel(self, exchange: Exchange) -> None:
        """End the download of a model; files that are complete stay."""
        model = _model_of(await read(exchange, _model_decoder))
        if not await self.manager.downloads.cancel(model):
            raise NotFoundError(
                f"No download of '{model[:200]}' is under way.",
                param="model",
                code="download_not_found",
            )
        await exchange.respond_json(self.manager.downloads.all[model].describe())

    @route("POST", "/admin/v1/models/load")
    async def load(self, exchange: Exchange) -> None:
        """Load a model, downloading it first if need be."""
        fields = decode(await exchange.body(MAX_BODY_BYTES), _load_decoder)
        wait, stream = _flag(fields, "wait", True), _flag(fields, "stream", False)
        model = self._settings_of(fields)
        configured = self.manager.configured.get(fields["model"])
        known = None if configured is None else configured.model
        from_hub = False
        if model.model != DEMO_MODEL:
            folder = await asyncio.to_thread(self._find, model.model, known)
            from_hub = folder is None
            if folder is not None:
                model = model.model_copy(update={"model": str(folder)})
        name = model.served_name
        work = self.manager.load(model, from_hub=from_hub)
        await self._answer(
            exchange,
            work,
            lambda: self.manager.find(name),
            self.manager.changes,
            wait=wait,
            stream=stream,
        )

    @route("POST", "/admin/v1/models/unload")
    async def unload(self, exchange: Exchange) -> None:
        """Unload a model, once its running calls have finished or had time to."""
        model = _model_of(await read(exchange, _model_decoder))
        exchange.cancel_on_disconnect()
        cut_off = await self.manager.unload(model)
        await exchange.respond_json(
            {"id": model, "object": "model", "state": "unloaded", "cut_off": cut_off}
        )

    def _settings_of(self, fields: dict[str, Any]) -> ModelSettings:
        """The settings of a model that is to be loaded.

        Raises:
            InvalidRequestError: a field is unknown or malformed.
            ForbiddenError: code of a checkpoint was to be run, or adapters read from anywhere.
        """
        given = fields.get("model")
        if given is None:
            raise missing_parameter("model")
        if not isinstance(given, str):
            raise wrong_type("model", "a string")
        _check_text("model", given, MAX_MODEL_CHARACTERS)
        for field in ("adapters", "adapter_folders"):
            if fields.get(field):
                raise ForbiddenError(
                    f"'{field}' names folders, and is read from the gateway's settings only.",
                    param=field,
                    code="path_not_allowed",
                )
        if fields.get("trust_remote_code"):
            raise ForbiddenError(
                "Code of checkpoints is not run at a request: give the model with "
                "trust_remote_code in the gateway's settings, and load it by its name.",
                param="trust_remote_code",
                code="remote_code_not_allowed",
            )
        configured = self.manager.configured.get(given)
        if configured is not None:
            name = fields.get("name", given)
            fields = {**configured.model_dump(exclude_unset=True), **fields}
            fields |= {"model": configured.model, "name": name}
        name = fields.get("name")
        if isinstance(name, str):
            _check_text("name", name, _MAX_NAME_CHARACTERS)
        try:
            return ModelSettings(**fields)
        except ValidationError as error:
            raise _explain(error) from None

    def _find(self, model: str, known: str | None) -> Path | None:
        """The folder that a model is to be loaded from; None for a hub id.

        Args:
            model: as it was given.
            known: what the settings load under its name; always allowed.

        Raises:
            ForbiddenError: the operator does not allow it.
            InvalidRequestError: it is neither a folder nor a hub id.
        """
        try:
            path = Path(model).expanduser()
            is_path = model.startswith(("/", ".", "~")) or path.exists()
            folder = path.resolve()
            allowed = [each.expanduser().resolve() for each in self.engines.model_folders]
        except (OSError, RuntimeError, ValueError) as error:
            raise invalid_value("model", f"it cannot be a path: {error}.") from None
        if not is_path:
            self._check_hub_id(model, is_allowed=model == known)
            return None
        if model != known and not any(folder.is_relative_to(each) for each in allowed):
            raise ForbiddenError(
                "Models are loaded at a request from no folders but those in the setting "
                "engines.model_folders.",
                param="model",
                code="path_not_allowed",
            )
        return folder

    def _check_hub_id(self, model: str, *, is_allowed: bool = False) -> None:
        if not _HUB_ID.fullmatch(model):
            raise invalid_value(
                "model", "expected a folder, or the name of a hub repository (OWNER/NAME)."
            )
        if not is_allowed and not any(
            fnmatchcase(model, pattern) for pattern in self.engines.hub_models
        ):
            raise ForbiddenError(
                f"The repository '{model}' is not among those that the setting engines.hub_models "
                "allows.",
                param="model",
                code="repository_not_allowed",
            )

    async def _answer(
        self,
        exchange: Exchange,
        work: asyncio.Task[None],
        describe: Callable[[], dict[str, Any]],
        changes: Sequence[Changes],
        *,
        wait: bool,
        stream: bool,
    ) -> None:
        """Answer with what `work` has come to: at its end, as it goes on, or (without `wait`) now.

        What `describe` says of it may be another after each of `changes`. A client that goes away
        does not end the work.
        """
        if not wait and not stream:
            await exchange.respond_json(describe(), 202)
            return
        exchange.cancel_on_disconnect()
        events = EventStream(exchange, self.keep_alive_s)
        if stream:
            await self._show_progress(events, work, describe, changes)
        await asyncio.wait({work})
        error = _error_of(work)
        if not stream:
            if error is not None:
                raise error
            await exchange.respond_json(describe())
        elif error is None:
            await events.finish(data_event(describe()) + DONE)
        elif exchange.responded:
            await events.fail(error)
        else:
            raise error

    async def _show_progress(
        self,
        events: EventStream,
        work: asyncio.Task[None],
        describe: Callable[[], dict[str, Any]],
        changes: Sequence[Changes],
    ) -> None:
        """Send what changes until the work has ended."""
        last: Mapping[str, Any] = {}
        while True:
            upcoming = [each.next() for each in changes]
            now = describe()
            if {**now, "unused_s": None} != last:
                last = {**now, "unused_s": None}
                await events.send(data_event(now))
                await asyncio.wait({work}, timeout=_PAUSE_S)
            elif events.is_silent:
                await events.keep_alive()
            if not work.done():
                await wait_for_change(upcoming, work, self.keep_alive_s)
            if work.done():
                return


def _error_of(work: asyncio.Task[None]) -> GatewayError | None:
    if work.cancelled():
        return ConflictError("It was ended by another request before it was done.", code="ended")
    error = work.exception()
    if error is None or isinstance(error, GatewayError):
        return error
    raise error


def _model_of(body: ModelBody) -> str:
    if not body.model:
        raise missing_parameter("model")
    _check_text("model", body.model, MAX_MODEL_CHARACTERS)
    return body.model


def _check_text(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise invalid_value(name, f"longer than {limit} characters.")
    if not _NAME.fullmatch(text):
        raise invalid_value(name, "empty, or with blanks at its ends or control characters in it.")


def _flag(fields: dict[str, Any], name: str, default: bool) -> bool:
    value = fields.pop(name, default)
    if not isinstance(value, bool):
        raise wrong_type(name, "a boolean")
    return value


def _explain(error: ValidationError) -> InvalidRequestError:
    fault = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in fault["loc"])[:80]
    if fault["type"] == "extra_forbidden":
        return unknown_field(name)
    return invalid_value(name, f"{fault['msg']}.")
