"""Parrot's own API: the routes and fields of the original (V3), so that its client works unchanged.

They differ from all other routes: bodies come with GET and DELETE too, success is always a 200
with an object, and errors have `traceback` next to `error`, without which the client does not show
them. See docs/parrot-api.md.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from secrets import randbits
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from parrot_scheduler.task import LATENCY

from parrot_gateway.api.parrot_v3.bodies import (
    AuthBody,
    GetVariableBody,
    NewVariableBody,
    Parameter,
    SemanticCallBody,
    SessionAuthBody,
    SessionBody,
    SetVariableBody,
    TransformBody,
    check_call,
    check_function_name,
    check_token_ids,
    max_tokens,
    sampling_fields,
    session_number,
)
from parrot_gateway.calls.requests.call import decode
from parrot_gateway.exceptions import (
    AuthenticationError,
    GatewayError,
    MethodNotAllowedError,
    SessionNotFoundError,
    UnsupportedError,
    invalid_value,
)
from parrot_gateway.http.dispatch import KeyCheck
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.routing.model_directory import (
    ChosenModel,
    ModelDirectory,
    ModelType,
    choose_model,
)
from parrot_gateway.semantic.call_chain import (
    ChainParameter,
    ChainSpec,
    new_variable,
    objective_of,
    submit_chain,
)
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.session_secret import SessionSecrets
from parrot_gateway.semantic.templates.json_text import well_formed
from parrot_gateway.semantic.transforms.transform import parse_transform
from parrot_gateway.semantic.variable import Variable
from parrot_gateway.settings.model import ParrotV3Settings
from parrot_gateway.telemetry.call_record import CallRecord, CallRecords

#: Answers a request with plain data.
Handler: TypeAlias = Callable[["_Request"], Awaitable[dict[str, Any]]]

_Body = TypeVar("_Body")

#: Ids are answered as numbers that any JSON library can hold.
_REQUEST_ID_BITS = 53
_NAME = re.compile(r"\{\w+\}")


class _Request(NamedTuple):
    exchange: Exchange
    tenant: str
    #: The last part of the path, where the route has one.
    name: str
    raw: bytes

    def body(self, kind: type[_Body]) -> _Body:
        """The body, checked.

        Raises:
            InvalidRequestError: naming the field at fault.
        """
        return decode(self.raw, msgspec.json.Decoder(kind))


def error_body(error: GatewayError) -> bytes:
    """An error as the original's client reads it, and as OpenAI's clients do."""
    return msgspec.json.encode({"error": error.to_dict(), "traceback": ""})


@dataclass(eq=False)
class ParrotRoutes:
    """The handler of all these routes."""

    models: ModelDirectory
    service: SemanticService
    settings: ParrotV3Settings
    _: KW_ONLY
    #: Of a request.
    max_body_bytes: int
    #: Checks the keys of callers that send one.
    keys: KeyCheck
    #: Get the records of calls.
    calls: CallRecords
    #: Of the sessions.
    session_secrets: SessionSecrets

    def __post_init__(self) -> None:
        table: tuple[tuple[str, str, Handler, str], ...] = (
            ("POST", "/v1/session", self._create_session, "Create a session"),
            ("GET", "/v1/session/{session_id}", self._describe_session, "Describe a session"),
            ("DELETE", "/v1/session/{session_id}", self._delete_session,
             "End a session's calls and free what it holds"),
            ("POST", "/v1/semantic_call", self._call,
             "Submit a call, given as a template with its parameters"),
            ("POST", "/v1/semantic_var", self._create_variable, "Create a semantic variable"),
            ("GET", "/v1/semantic_var", self._list_variables,
             "List the semantic variables of a session"),
            ("POST", "/v1/semantic_var/{var_id}", self._set_variable, "Set a semantic variable"),
            ("GET", "/v1/semantic_var/{var_id}", self._get_variable,
             "Wait for the value of a semantic variable"),
            ("POST", "/v1/transform", self._transform, "Submit a transform of a semantic variable"),
            ("POST", "/v1/py_native_call", self._refuse_code, ""),
            ("POST", "/v1/submit_py_native_call", self._refuse_code, ""),
        )  # fmt: skip
        #: Method, path and summary of each route, for the description of the API.
        self.described = [(method, path, summary) for method, path, _, summary in table if summary]
        self._routes: defaultdict[str, dict[str, Handler]] = defaultdict(dict)
        for method, path, handler, _ in table:
            self._routes[_NAME.sub("{}", path)][method] = handler

    def find(self, exchange: Exchange) -> Callable[[Exchange], Awaitable[None]] | None:
        """Find the handler of a path of this API, whose errors have a form of their own."""
        found = self._route(exchange.path)
        if found is None:
            return None
        exchange.on_error(error_body)
        return lambda exchange: self._answer(exchange, *found)

    def _route(self, path: str) -> tuple[dict[str, Handler], str] | None:
        """The handlers of a path, and its last part where that is a name."""
        methods = self._routes.get(path)
        if methods is not None:
            return methods, ""
        parent, _, name = path.rpartition("/")
        methods = self._routes.get(f"{parent}/{{}}") if name else None
        return None if methods is None else (methods, name)

    async def _answer(self, exchange: Exchange, methods: dict[str, Handler], name: str) -> None:
        tenant = self._tenant(exchange)
        handler = methods.get(exchange.method)
        if handler is None:
            raise MethodNotAllowedError(
                f"{exchange.path} takes {' and '.join(methods)}, not {exchange.method}."
            )
        raw = await exchange.body(self.max_body_bytes)
        exchange.cancel_on_disconnect()
        await exchange.respond_json(await handler(_Request(exchange, tenant, name, raw)))

    def _tenant(self, exchange: Exchange) -> str:
        """Whose request it is: the key's tenant, or that of those without a key."""
        authorization = exchange.headers.get(b"authorization")
        if authorization is not None:
            return self.keys.check(authorization)
        allowed = self.settings.keyless
        if allowed is None:
            allowed = not self.keys.required
        if not allowed:
            raise AuthenticationError(
                "You didn't provide an API key. Send it as 'Authorization: Bearer KEY'. The "
                "original client of these routes cannot: its calls are taken where the operator "
                "sets parrot_v3.keyless."
            )
        return self.settings.keyless_tenant

    # -- sessions ---------------------------------------------------------------------------

    async def _create_session(self, request: _Request) -> dict[str, Any]:
        request.body(SessionBody)
        number = self.session_secrets.mint()
        self.service.session(request.tenant, self.session_secrets.name_of(number))
        return {"session_id": number, "session_auth": self.session_secrets.proof_of(number)}

    async def _describe_session(self, request: _Request) -> dict[str, Any]:
        session = self._session_of_path(request)
        states = [node.state for node in session.graph]
        return {
            "name": session.name,
            "vars": session.num_variables,
            "value_bytes": session.value_bytes,
            "calls": {state: states.count(state) for state in dict.fromkeys(states)},
        }

    async def _delete_session(self, request: _Request) -> dict[str, Any]:
        self.service.close_session(self._session_of_path(request))
        return {}

    def _session_of_path(self, request: _Request) -> Session:
        auth = request.body(AuthBody).session_auth
        return self._owned(request, session_number(request.name), auth)

    def _session(self, request: _Request, number: int) -> Session:
        sessions = self.service.sessions
        try:
            return sessions.find(
                request.tenant, self.session_secrets.name_of(number), self.service.clock()
            )
        except SessionNotFoundError:
            raise SessionNotFoundError(_shown(number), param="session_id") from None

    def _owned(self, request: _Request, number: int, proof: str) -> Session:
        """The same, for a caller that proves to own it."""
        self.session_secrets.check(number, proof)
        return self._session(request, number)

    def _session_of_body(self, request: _Request, body: SessionAuthBody) -> Session:
        return self._owned(request, session_number(body.session_id), body.session_auth)

    # -- variables --------------------------------------------------------------------------

    async def _create_variable(self, request: _Request) -> dict[str, Any]:
        body = request.body(NewVariableBody)
        variable = new_variable(
            self._session_of_body(request, body), body.var_name or "variable", "var_name"
        )
        return {"var_id": variable.id, "var_name": variable.name}

    async def _set_variable(self, request: _Request) -> dict[str, Any]:
        body = request.body(SetVariableBody)
        session = self._session_of_body(request, body)
        self.service.set_value(session.lookup(request.name, "var_id"), body.content)
        return {}

    async def _get_variable(self, request: _Request) -> dict[str, Any]:
        body = request.body(GetVariableBody)
        objective = objective_of(body.criteria, "criteria")
        session = self._session_of_body(request, body)
        content = await self.service.readers.value(
            session.lookup(request.name, "var_id"),
            self.settings.get_timeout_s,
            LATENCY if objective is None else objective,
        )
        return {"content": well_formed(content)}

    async def _list_variables(self, request: _Request) -> dict[str, Any]:
        session = self._session_of_body(request, request.body(SessionAuthBody))
        return {
            "vars": [
                {"var_id": item.id, "var_name": item.name, "state": item.state} for item in session
            ]
        }

    # -- calls ------------------------------------------------------------------------------

    async def _call(self, request: _Request) -> dict[str, Any]:
        body = request.body(SemanticCallBody)
        check_call(body)
        objective = objective_of(body.output_criteria, "output_criteria")
        number = session_number(body.session_id)
        if body.session_auth is not None:
            self.session_secrets.check(number, body.session_auth)
        session = self._session(request, number)
        model = self._choose(body)
        parameters = [
            _chain_parameter(index, parameter, model)
            for index, parameter in enumerate(body.parameters)
        ]
        if model.is_own:
            self._check_token_ids(model.name, body)
        variables = await submit_chain(
            self.service,
            session,
            ChainSpec(
                template=body.template,
                parameters=parameters,
                model=model.name,
                form="messages" if body.model_type == "text" and not model.is_own else "text",
                objective=objective,
                name=body.func_name or "",
                headers=list(request.exchange.scope["headers"]),
                max_characters=self.max_body_bytes,
                begin_record=partial(self._begin_record, request.exchange),
            ),
        )
        return {
            "request_id": randbits(_REQUEST_ID_BITS),
            "param_info": [
                _param_info(parameter.name, parameter.is_output, variable)
                for parameter, variable in zip(body.parameters, variables, strict=True)
            ],
        }

    def _begin_record(self, exchange: Exchange, record: CallRecord) -> None:
        record.request_id, record.started, record.deferred = (
            exchange.request_id,
            exchange.started,
            True,
        )
        self.calls.begin(record, exchange.path, exchange.headers)

    def _choose(self, body: SemanticCallBody) -> ChosenModel:
        models = self.models
        return choose_model(
            body.models or (),
            cast(ModelType, body.model_type or "token_id"),
            resolve=models.resolve,
            own=models.engine_models(),
            listed=[name for item in models.upstreams.values() for name in item.models()],
        )

    def _check_token_ids(self, model: str, body: SemanticCallBody) -> None:
        """Refuse ids that the model's vocabulary lacks, if an engine of it is there already."""
        engines = self.models.engines_for(self.models.resolve(model).model)
        for index, parameter in enumerate(body.parameters):
            if engines and parameter.sampling_config is not None:
                where = f"parameters[{index}].sampling_config"
                check_token_ids(parameter.sampling_config, engines[0].info.vocab_size, where)

    async def _transform(self, request: _Request) -> dict[str, Any]:
        body = request.body(TransformBody)
        check_function_name(body.func_name)
        transform = parse_transform(body.transform)
        if transform.needs_tokens:
            raise invalid_value(
                "transform",
                "tokens are those of a model, and this transform stands between variables alone: "
                "count characters instead.",
            )
        session = self._session_of_body(request, body)
        source = session.lookup(body.input, "input")
        if body.output is None:
            output = new_variable(session, body.func_name or "transformed", "func_name")
        else:
            output = session.lookup(body.output, "output")
        try:
            name = body.func_name or ""
            self.service.submit_transform(session, source, transform, output, name)
        except GatewayError:
            if body.output is None:
                session.delete(output.id)
            raise
        return {
            "request_id": randbits(_REQUEST_ID_BITS),
            "param_info": [
                _param_info("input", False, source),
                _param_info("output", True, output),
            ],
        }

    async def _refuse_code(self, request: _Request) -> dict[str, Any]:
        raise UnsupportedError(
            "This gateway never runs code that comes over the network. What native functions were "
            "for is done by declared transforms: POST /v1/transform with a pipeline such as "
            "\"code_block('json') | json('/name') | strip\" (see docs/transforms.md); anything "
            "else belongs into your program, between get and set of two variables.",
            param="func_code",
            code="unsupported_route",
        )


def _chain_parameter(index: int, parameter: Parameter, model: ChosenModel) -> ChainParameter:
    fields: dict[str, Any] = {}
    if parameter.is_output:
        fields = {
            "max_tokens": max_tokens(parameter.sampling_config),
            **sampling_fields(parameter.sampling_config, is_own=model.is_own),
        }
    return ChainParameter(
        name=parameter.name,
        is_output=parameter.is_output,
        variable_id=parameter.var_id,
        value=parameter.value,
        fields=fields,
        param=f"parameters[{index}]",
    )


def _param_info(parameter: str, is_output: bool, variable: Variable) -> dict[str, Any]:
    return {
        "parameter_name": parameter,
        "is_output": is_output,
        "var_name": variable.name,
        "var_id": variable.id,
    }


def _shown(number: int) -> str:
    """A number that is a secret, for messages."""
    digits = str(number)
    return digits if len(digits) <= 8 else f"{digits[:4]}…{digits[-4:]}"
