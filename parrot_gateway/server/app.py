"""The application: wires the parts of a gateway to the HTTP surface."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from fastapi import FastAPI, WebSocket
from starlette.middleware.cors import ALL_METHODS, CORSMiddleware

from parrot_gateway.api.admin.adapters import AdapterRoutes
from parrot_gateway.api.admin.config import ConfigRoutes
from parrot_gateway.api.admin.drains import DrainRoutes
from parrot_gateway.api.admin.models import ModelRoutes
from parrot_gateway.api.anthropic.errors import use_anthropic_shape
from parrot_gateway.api.batches.batches import BatchRoutes
from parrot_gateway.api.batches.files import FileRoutes
from parrot_gateway.api.batches.line_caller import LineCaller
from parrot_gateway.api.calls import CallRoutes
from parrot_gateway.api.engine_join import JOIN_PATH, EngineLinkEndpoint
from parrot_gateway.api.openapi import describe_routes
from parrot_gateway.api.parrot_v3.routes import ParrotRoutes
from parrot_gateway.api.semantic.sessions import SessionRoutes
from parrot_gateway.api.semantic.variables import VariableRoutes
from parrot_gateway.http.admin import AdminRoutes
from parrot_gateway.http.dispatch import ASGIApp, Dispatcher, Handler, KeyCheck
from parrot_gateway.http.metrics_port import MetricsPort
from parrot_gateway.http.route_table import RouteTable
from parrot_gateway.http.web_pages import WebPageGuard
from parrot_gateway.semantic.session_secret import SessionSecrets
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.server.management import add_metrics_route, create_management_app, knows_path
from parrot_gateway.server.reload import SettingsReloader
from parrot_gateway.settings.config_file import ConfigFile
from parrot_gateway.settings.model import Settings, admin_key_of, api_key_of
from parrot_gateway.settings.sources import SettingsSources
from parrot_gateway.ui.call_text import CallTexts
from parrot_gateway.ui.routes import LiveRoutes
from parrot_gateway.ui.static_files import PageFiles

_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")


def create_app(
    gateway: Gateway,
    *,
    join_url: str | None = None,
    metrics_port: int | None = None,
    reloader: SettingsReloader | None = None,
) -> ASGIApp:
    """The ASGI application of `gateway`; its lifespan starts and stops the parts.

    Args:
        gateway: built from settings, not yet started.
        join_url: where engine processes of our own reach `/v1/engines/join` of this very
            application. None starts no engine processes (engines may still join from outside).
        metrics_port: a port of the server at which only `/metrics` is answered.
        reloader: exchanges the settings, and the routes with them; by default at requests only.
    """
    settings = gateway.settings
    keys = KeyCheck(api_key_of(settings))
    management = create_management_app(gateway, keys)
    if settings.telemetry.metrics:
        add_metrics_route(management, gateway, keys)
    if reloader is None:
        reloader = SettingsReloader(gateway, SettingsSources(ConfigFile.empty()))
    make = _RoutesMaker(gateway, management, keys, reloader)
    routes = make.routes(settings)
    describe_routes(management, routes.by_tag)
    dispatcher, lines = routes.dispatcher, LineCaller(routes.unattended, gateway.call_records)

    def exchange(settings: Settings) -> Callable[[], None]:
        """Routes of other settings are made; the result puts them into service."""
        key, routes = api_key_of(settings), make.routes(settings)

        def put_into_service() -> None:
            if key is not None:
                keys.use(key)
            dispatcher.take_over(routes.dispatcher)
            lines.use(routes.unattended)

        return put_into_service

    reloader.routes_by(exchange)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start(join_url)
        await gateway.batches.start(lines)
        try:
            yield
        finally:
            await gateway.close()

    management.router.lifespan_context = lifespan
    endpoint = EngineLinkEndpoint(
        gateway.registry,
        gateway.join_keys(),
        settings.engines.heartbeat_s,
        own_key=gateway.own_join_key,
        is_own_name=gateway.supervisor.owns,
    )

    @management.websocket(JOIN_PATH)
    async def join(websocket: WebSocket) -> None:
        await endpoint(websocket)

    app: ASGIApp = dispatcher
    if settings.server.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.server.cors_origins,
            allow_methods=ALL_METHODS,
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network=True,
        )
    return app if metrics_port is None else MetricsPort(app, metrics_port, gateway.metrics.page)


class _Routes(NamedTuple):
    dispatcher: Dispatcher
    #: Answers requests that no client waits for.
    unattended: Handler
    #: Method, path and summary of each that does not go through FastAPI, by tag.
    by_tag: dict[str, list[tuple[str, str, str]]]


class _RoutesMaker:
    """Makes the routes of settings, around the same parts each time.

    Args:
        gateway: the parts.
        management: all routes that stay the same.
        keys: of callers.
        reloader: behind `/admin/v1/config`.
    """

    def __init__(
        self, gateway: Gateway, management: FastAPI, keys: KeyCheck, reloader: SettingsReloader
    ) -> None:
        self._gateway = gateway
        self._management = management
        self._keys = keys
        self._reloader = reloader
        self._page = PageFiles()
        #: Sessions outlive their routes.
        self._secrets = SessionSecrets(secrets.token_bytes(32))

    def routes(self, settings: Settings) -> _Routes:
        gateway, server = self._gateway, settings.server
        models, semantic, page = gateway.models, gateway.semantic, self._page
        routes = CallRoutes(
            models,
            semantic,
            gateway.responses,
            gateway.background,
            server,
            gateway.linking,
            gateway.inferred,
            settings.sessions.identity,
        )
        own = RouteTable(
            VariableRoutes(semantic, server),
            SessionRoutes(semantic, gateway.linking, gateway.scheduling.explanations),
        )
        local = (gateway.batches, models, routes.passthrough, server.max_body_bytes)
        batches, files = RouteTable(BatchRoutes(*local)), RouteTable(FileRoutes(*local))
        parrot = ParrotRoutes(
            models,
            semantic,
            settings.parrot_v3,
            max_body_bytes=server.max_body_bytes,
            keys=self._keys,
            calls=gateway.call_records,
            session_secrets=self._secrets,
        )
        admin_key = admin_key_of(settings)
        admin = AdminRoutes(
            admin_key,
            ModelRoutes(gateway.model_manager, settings.engines, server),
            AdapterRoutes(gateway.adapters),
            DrainRoutes(gateway.registry, gateway.upstreams, gateway.gate),
            ConfigRoutes(self._reloader),
        )
        live = LiveRoutes(
            gateway.feed,
            gateway.linking,
            gateway.scheduling.explanations,
            CallTexts(
                settings.telemetry, gateway.kept_content, gateway.semantic, gateway.responses
            ),
            self._keys if admin_key is None else KeyCheck(admin_key),
            is_admin=admin_key is not None,
            keep_alive_s=server.keep_alive_s,
        )
        by_tag = {
            "sessions": own.described,
            "batches": [*files.described, *batches.described],
            "Parrot's own API": parrot.described,
            "admin": admin.described,
            "live page": live.described,
        }
        dispatcher = Dispatcher(
            hot={
                "/v1/completions": routes.completions,
                "/v1/chat/completions": routes.chat_completions,
                "/v1/messages": routes.messages,
                "/v1/messages/count_tokens": routes.count_tokens,
                "/tokenize": routes.tokenize,
                "/detokenize": routes.detokenize,
                **dict.fromkeys(("/rerank", "/v2/rerank", "/score"), routes.pooling),
            },
            shapes=dict.fromkeys(_ANTHROPIC_PATHS, use_anthropic_shape),
            parrot=parrot.find,
            admin=lambda exchange: (
                admin.find(exchange) or live.find(exchange) or page.find(exchange)
            ),
            own=lambda exchange: own.find(exchange) or batches.find(exchange),
            forms=files.find,
            passthrough=routes.passthrough,
            management=self._management,
            is_management=knows_path,
            keys=self._keys,
            guard=WebPageGuard([server.host, *server.allowed_hosts], server.cors_origins),
            gate=gateway.gate,
            calls=gateway.call_records,
            log_access=server.access_log,
        )
        return _Routes(dispatcher, routes.unattended, by_tag)
