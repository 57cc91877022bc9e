"""The application: wires the parts of a gateway to the HTTP surface."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, WebSocket
from starlette.middleware.cors import ALL_METHODS, CORSMiddleware

from parrot_gateway.api.admin.adapters import AdapterRoutes
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
from parrot_gateway.http.dispatch import ASGIApp, Dispatcher, KeyCheck
from parrot_gateway.http.metrics_port import MetricsPort
from parrot_gateway.http.route_table import RouteTable
from parrot_gateway.http.web_pages import WebPageGuard
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.server.management import add_metrics_route, create_management_app, knows_path
from parrot_gateway.settings.model import admin_key_of, api_key_of
from parrot_gateway.ui.routes import LiveRoutes
from parrot_gateway.ui.static_files import PageFiles


def create_app(
    gateway: Gateway, *, join_url: str | None = None, metrics_port: int | None = None
) -> ASGIApp:
    """The ASGI application of `gateway`; its lifespan starts and stops the parts.

    Args:
        gateway: built from settings, not yet started.
        join_url: where engine processes of our own reach `/v1/engines/join` of this very
            application. None starts no engine processes (engines may still join from outside).
        metrics_port: a port of the server at which only `/metrics` is answered.
    """
    server = gateway.settings.server
    keys = KeyCheck(api_key_of(gateway.settings))
    management = create_management_app(gateway, keys)
    if gateway.settings.telemetry.metrics:
        add_metrics_route(management, gateway, keys)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start(join_url)
        await gateway.batches.start(LineCaller(routes.unattended, gateway.call_records))
        try:
            yield
        finally:
            await gateway.close()

    management.router.lifespan_context = lifespan
    endpoint = EngineLinkEndpoint(
        gateway.registry, gateway.join_keys(), gateway.settings.engines.heartbeat_s
    )

    @management.websocket(JOIN_PATH)
    async def join(websocket: WebSocket) -> None:
        await endpoint(websocket)

    settings, models, semantic = gateway.settings, gateway.models, gateway.semantic
    routes = CallRoutes(
        models, semantic, gateway.responses, gateway.background, settings.server, gateway.linking,
        gateway.inferred,
    )  # fmt: skip
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
        max_body_bytes=settings.server.max_body_bytes,
        keys=keys,
        calls=gateway.call_records,
    )
    admin = AdminRoutes(
        admin_key_of(settings),
        ModelRoutes(gateway.model_manager, settings.engines, server),
        AdapterRoutes(gateway.adapters),
        DrainRoutes(gateway.registry, gateway.upstreams, gateway.gate),
    )
    admin_key = admin_key_of(settings)
    live = LiveRoutes(
        gateway.feed,
        gateway.linking,
        gateway.scheduling.explanations,
        keys if admin_key is None else KeyCheck(admin_key),
        is_admin=admin_key is not None,
        keep_alive_s=server.keep_alive_s,
    )
    page = PageFiles()
    routes_by_tag = {
        "sessions": own.described,
        "batches": [*files.described, *batches.described],
        "Parrot's own API": parrot.described,
        "admin": admin.described,
        "live page": live.described,
    }
    describe_routes(management, routes_by_tag)
    app: ASGIApp = Dispatcher(
        hot={
            "/v1/completions": routes.completions,
            "/v1/chat/completions": routes.chat_completions,
            "/v1/messages": routes.messages,
            "/v1/messages/count_tokens": routes.count_tokens,
            "/tokenize": routes.tokenize,
            "/detokenize": routes.detokenize,
            **dict.fromkeys(("/rerank", "/v2/rerank", "/score"), routes.pooling),
        },
        shapes=dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), use_anthropic_shape),
        parrot=parrot.find,
        admin=lambda exchange: admin.find(exchange) or live.find(exchange) or page.find(exchange),
        own=lambda exchange: own.find(exchange) or batches.find(exchange),
        forms=files.find,
        passthrough=routes.passthrough,
        management=management,
        is_management=knows_path,
        keys=keys,
        guard=WebPageGuard([server.host, *server.allowed_hosts], server.cors_origins),
        gate=gateway.gate,
        calls=gateway.call_records,
        log_access=server.access_log,
    )
    if server.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=server.cors_origins,
            allow_methods=ALL_METHODS,
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network=True,
        )
    return app if metrics_port is None else MetricsPort(app, metrics_port, gateway.metrics.page)
