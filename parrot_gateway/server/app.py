"""The application: wires the parts of a gateway to the HTTP surface."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, WebSocket
from starlette.middleware.cors import ALL_METHODS, CORSMiddleware

from parrot_gateway.api.admin.adapters import AdapterRoutes
from parrot_gateway.api.admin.config import ConfigRoutes
from parrot_gateway.api.admin.drains import DrainRoutes
from parrot_gateway.api.admin.models import ModelRoutes
from parrot_gateway.api.anthropic.errors import use_anthropic_shape
from parrot_gateway.api.anthropic.routes import MessageRoutes
from parrot_gateway.api.batches.batches import BatchRoutes
from parrot_gateway.api.batches.files import FileRoutes
from parrot_gateway.api.batches.line_caller import LineCaller
from parrot_gateway.api.calls import CallRoutes
from parrot_gateway.api.engine_join import JOIN_PATH, EngineLinkEndpoint
from parrot_gateway.api.openapi import describe_routes
from parrot_gateway.api.other_routes import OtherRoutes
from parrot_gateway.api.parrot_v3.routes import ParrotRoutes
from parrot_gateway.api.responses.routes import ResponseRoutes
from parrot_gateway.api.semantic.sessions import SessionRoutes
from parrot_gateway.api.semantic.variables import VariableRoutes
from parrot_gateway.api.streams.routes import StreamRoutes
from parrot_gateway.http.admin import AdminRoutes
from parrot_gateway.http.dispatch import (
    ANY_CALLS,
    JSON_CALLS,
    OPERATOR_ROUTES,
    READERS,
    SELF_CHECKED_CALLS,
    ASGIApp,
    Dispatcher,
    Handler,
)
from parrot_gateway.http.metrics_port import MetricsPort
from parrot_gateway.http.route_table import RouteTable
from parrot_gateway.http.web_pages import WebPageGuard
from parrot_gateway.semantic.session_secret import SessionSecrets
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.server.management import add_metrics_route, create_management_app, knows_path
from parrot_gateway.server.reload import SettingsReloader
from parrot_gateway.settings.config_file import ConfigFile
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
    """Create the ASGI application of `gateway`; its lifespan starts and stops the parts.

    Args:
        gateway: built from settings, not yet started.
        join_url: URL of this application's `/v1/engines/join` for engine processes of our
            own. None starts no engine processes (engines may still join from outside).
        metrics_port: a port of the server that answers only `/metrics`.
        reloader: exchanges the settings; the default one does so only on request.
    """
    settings = gateway.settings
    if reloader is None:
        reloader = SettingsReloader(gateway, SettingsSources(ConfigFile.empty()))
    management = create_management_app(gateway, reloader.keys)
    if settings.telemetry.metrics:
        add_metrics_route(management, gateway, reloader.keys, reloader.admin_keys)
    dispatcher, unattended = _routes(gateway, management, reloader)
    lines = LineCaller(unattended, gateway.call_records)

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
        settings.engines.stall_s,
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


def _routes(
    gateway: Gateway, management: FastAPI, reloader: SettingsReloader
) -> tuple[Dispatcher, Handler]:
    """Return all routes, and the handler of requests without a waiting client."""
    settings, server = gateway.settings, gateway.settings.server
    models, semantic, page = gateway.models, gateway.semantic, PageFiles()
    keys, admin_keys = reloader.keys, reloader.admin_keys
    linking, inferred = gateway.linking, gateway.inferred
    calls = CallRoutes(
        models, semantic, server, linking, inferred, gateway.streams, settings.sessions.identity
    )
    messages = MessageRoutes(calls)
    responses = ResponseRoutes(
        models, gateway.responses, gateway.background, server, calls.recorded, linking, inferred
    )
    routes = OtherRoutes(calls, responses, semantic)
    own = RouteTable(
        VariableRoutes(semantic, server),
        SessionRoutes(semantic, gateway.linking, gateway.scheduling.explanations),
    )
    streams = RouteTable(StreamRoutes(gateway.streams))
    local = (gateway.batches, models, routes.passthrough, server.max_body_bytes)
    batches, files = RouteTable(BatchRoutes(*local)), RouteTable(FileRoutes(*local))
    parrot = ParrotRoutes(
        models,
        semantic,
        settings.parrot_v3,
        max_body_bytes=server.max_body_bytes,
        keys=keys,
        calls=gateway.call_records,
        session_secrets=SessionSecrets(secrets.token_bytes(32)),
    )
    admin = AdminRoutes(
        admin_keys,
        ModelRoutes(gateway.model_manager, settings.engines, server),
        AdapterRoutes(gateway.adapters),
        DrainRoutes(gateway.registry, gateway.upstreams, gateway.gate),
        ConfigRoutes(reloader),
    )
    live = LiveRoutes(
        gateway.feed,
        gateway.linking,
        gateway.scheduling.explanations,
        CallTexts(settings.telemetry, gateway.kept_content, gateway.semantic, gateway.responses),
        admin_keys if admin_keys.required else keys,
        is_admin=admin_keys.required,
        keep_alive_s=server.keep_alive_s,
    )
    by_tag: dict[str, list[tuple[str, str, str]]] = {
        "calls": streams.described,
        "sessions": own.described,
        "batches": [*files.described, *batches.described],
        "Parrot's own API": parrot.described,
        "admin": admin.described,
        "live page": live.described,
    }
    describe_routes(management, by_tag)
    dispatcher = Dispatcher(
        hot={
            "/v1/completions": calls.completions,
            "/v1/chat/completions": calls.chat_completions,
            "/v1/messages": messages.messages,
            "/v1/messages/count_tokens": messages.count_tokens,
            "/tokenize": routes.tokenize,
            "/detokenize": routes.tokenize,
            **dict.fromkeys(("/rerank", "/v2/rerank", "/score"), routes.pooling),
        },
        shapes=dict.fromkeys(_ANTHROPIC_PATHS, use_anthropic_shape),
        tables=[
            (parrot.find, SELF_CHECKED_CALLS),
            (admin.find, OPERATOR_ROUTES),
            (live.find, OPERATOR_ROUTES),
            (page.find, OPERATOR_ROUTES),
            (own.find, JSON_CALLS),
            (streams.find, READERS),
            (batches.find, JSON_CALLS),
            (files.find, ANY_CALLS),
        ],
        passthrough=routes.passthrough,
        management=management,
        is_management=knows_path,
        keys=keys,
        guard=WebPageGuard([server.host, *server.allowed_hosts], server.cors_origins),
        gate=gateway.gate,
        calls=gateway.call_records,
        log_access=server.access_log,
    )
    return dispatcher, routes.unattended
