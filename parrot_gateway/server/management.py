"""Management routes, on FastAPI: models, health, version, the API's own description.

`api` serves calls; errors have the same shape here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse
from starlette.exceptions import HTTPException

from parrot_gateway import __version__
from parrot_gateway.exceptions import (
    AuthenticationError,
    GatewayError,
    InvalidRequestError,
    MethodNotAllowedError,
    ModelNotFoundError,
    NotFoundError,
)
from parrot_gateway.http.dispatch import KeyCheck
from parrot_gateway.http.web_pages import preflight_advice
from parrot_gateway.telemetry.metrics.exposition import negotiate
from parrot_gateway.ui.static_files import REFERENCE, SAFE_HEADERS

if TYPE_CHECKING:
    from parrot_gateway.server.gateway import Gateway


def create_management_app(gateway: Gateway, keys: KeyCheck) -> FastAPI:
    """Create the FastAPI application; the dispatcher checks keys before calling it."""
    app = FastAPI(
        title="Parrot Gateway",
        version=__version__,
        description="An OpenAI-compatible gateway that sees the application behind the calls.",
        # NOTE: FastAPI's own pages load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )

    @app.get("/", include_in_schema=False)
    async def root(request: Request) -> RedirectResponse:
        if "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)
        # NOTE: relative, because a proxy may serve the gateway under a path prefix.
        return RedirectResponse("ui/", headers={"vary": "accept"})

    reference = REFERENCE.read_text(encoding="utf-8")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        headers = {name.decode(): value.decode() for name, value in SAFE_HEADERS}
        return HTMLResponse(reference, headers=headers)

    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models", tags=["models"], summary="List models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": list(_models(gateway).values())}

    @app.get("/v1/models/{model:path}", tags=["models"], summary="Describe a model")
    async def get_model(model: str) -> dict[str, Any]:
        found = _models(gateway).get(model)
        if found is None:
            raise ModelNotFoundError(f"The model '{model}' does not exist.", param="model")
        return found

    @app.get("/health", tags=["health"], summary="State of all parts (details need the key)")
    async def health(request: Request) -> JSONResponse:
        ready = gateway.is_ready()
        content: dict[str, Any] = {"status": _status(gateway), "version": __version__}
        given = dict(request.scope["headers"])
        try:
            keys.check(given.get(b"authorization"), given.get(b"x-api-key"))
        except AuthenticationError:
            pass
        else:
            content |= await gateway.describe()
        return JSONResponse(content, 200 if ready else 503)

    @app.get("/health/liveness", tags=["health"], summary="The process answers")
    async def liveness() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/health/readiness", tags=["health"], summary="Calls can be answered")
    async def readiness() -> JSONResponse:
        return JSONResponse({"status": _status(gateway)}, 200 if gateway.is_ready() else 503)

    @app.get("/version", tags=["health"], summary="Version of the gateway")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.exception_handler(GatewayError)
    async def gateway_error(_: Request, error: GatewayError) -> JSONResponse:
        return _error_response(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        fault = error.errors()[0]
        field = ".".join(str(part) for part in fault["loc"][1:])
        return _error_response(InvalidRequestError(f"{field}: {fault['msg']}", param=field or None))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return _error_response(_routing_error(request, error))

    return app


def add_metrics_route(app: FastAPI, gateway: Gateway, keys: KeyCheck, admin_keys: KeyCheck) -> None:
    """Add `/metrics`, for callers with the gateway's key or the admin key, or for everyone."""
    access = gateway.settings.telemetry.metrics_access

    @app.get(
        "/metrics",
        tags=["health"],
        summary="Metrics, for Prometheus",
        response_class=PlainTextResponse,
    )
    async def metrics(request: Request) -> PlainTextResponse:
        given = dict(request.scope["headers"])
        credentials = given.get(b"authorization"), given.get(b"x-api-key")
        if access == "key":
            try:
                keys.check(*credentials)
            except AuthenticationError:
                if not admin_keys.required:
                    raise
                admin_keys.check(*credentials)
        kind = negotiate(request.headers.get("accept", ""))
        return PlainTextResponse(await gateway.metrics.page(kind), media_type=kind)


def knows_path(path: str) -> bool:
    """Return true for a management route under `/v1/`, false for a path for an upstream."""
    return path == "/v1/models" or path.startswith(("/v1/models/", "/v1/engines/"))


def _status(gateway: Gateway) -> str:
    if gateway.gate.is_draining:
        return "draining"
    return "ok" if gateway.is_ready() else "starting"


def _models(gateway: Gateway) -> dict[str, dict[str, Any]]:
    """Return every model name that can be requested, aliases included."""
    started = int(gateway.started_at)
    models: dict[str, dict[str, Any]] = {}
    for name in gateway.supervisor.models():
        # Listed even while its engine starts or restarts: calls then get a 503 with `retry-after`.
        models[name] = _model(name, started, "parrot-gateway")
    for served in gateway.registry.models():
        listed = models.setdefault(
            served.id, _model(served.id, int(served.created), "parrot-gateway")
        )
        listed["max_model_len"] = served.info.max_context_tokens
    for name, engines in gateway.registry.adapted.items():
        base, path = engines[0].info, engines[0].adapters[name].path
        adapter = _model(name, int(engines[0].joined_at), "parrot-gateway", path, base.model)
        models.setdefault(name, {**adapter, "max_model_len": base.max_context_tokens})
    for upstream in gateway.upstreams.values():
        for name in upstream.models():
            models.setdefault(name, _model(name, started, upstream.name))
    for alias in gateway.models.aliases():
        target = gateway.settings.aliases[alias]
        listed = models.setdefault(alias, _model(alias, started, "parrot-gateway", root=target))
        named = models.get(target, {})
        if "max_model_len" in named:
            listed.setdefault("max_model_len", named["max_model_len"])
    return models


def _model(
    name: str, created: int, owner: str, root: str | None = None, parent: str | None = None
) -> dict[str, Any]:
    """Build a model object with vLLM's fields.

    `root` is an alias's target or an adapter's folder, `parent` its model.
    """
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": owner,
        "root": root or name,
        "parent": parent,
        "permission": [permission],
    }


def _routing_error(request: Request, error: HTTPException) -> GatewayError:
    path, method = request.url.path, request.method
    if error.status_code == 405:
        advice = preflight_advice(dict(request.headers.raw)) if method == "OPTIONS" else ""
        return MethodNotAllowedError(f"{path} does not take {method}.{advice}")
    if error.status_code == 404:
        hint = ""
        if not path.startswith("/v1"):
            hint = " The API is under /v1: does your base URL end in /v1?"
        return NotFoundError(f"Unknown route: {method} {path}.{hint}", code="unknown_route")
    return InvalidRequestError(str(error.detail))


def _error_response(error: GatewayError) -> JSONResponse:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return JSONResponse({"error": error.to_dict()}, error.status, headers)
