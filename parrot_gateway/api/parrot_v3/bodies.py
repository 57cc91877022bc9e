"""The request bodies of Parrot's own API, and what they mean.

Field names are those of the original (V3). Unknown fields are ignored: its client sends some by
mistake. A known field that cannot be honoured is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from parrot_gateway.calls.requests import field_checks
from parrot_gateway.calls.requests.field_checks import check_choice, check_range
from parrot_gateway.calls.requests.types import (
    AtLeast1,
    Fraction,
    LogitBias,
    Penalty,
    Seed,
    Stop,
    StopTokenIds,
    Temperature,
)
from parrot_gateway.exceptions import InvalidRequestError, UnsupportedError, invalid_value
from parrot_gateway.routing.model_directory import MODEL_TYPES
from parrot_gateway.semantic.session import MAX_NAME

#: Parameters of one call, and models that it allows.
MAX_PARAMETERS = 1024
MAX_MODELS = 128
#: The original's default for the tokens of one output.
DEFAULT_MAX_TOKENS = 512

#: JSON has no limit for integers, but many libraries do: digits in a string are the same id.
SessionId: TypeAlias = int | str


class SessionBody(msgspec.Struct):
    """`POST /v1/session`. The original's client sends a constant `api_key`, which means nothing."""


class AuthBody(msgspec.Struct):
    """`GET` and `DELETE /v1/session/{id}`; the session is named by the path."""

    session_auth: str = ""


class SessionAuthBody(msgspec.Struct):
    """The fields of all requests about variables; the body of `GET /v1/semantic_var`."""

    session_id: SessionId
    session_auth: str = ""


class NewVariableBody(SessionAuthBody):
    """`POST /v1/semantic_var`."""

    var_name: str | None = None


class SetVariableBody(SessionAuthBody, kw_only=True):
    """`POST /v1/semantic_var/{var_id}`."""

    content: str


class GetVariableBody(SessionAuthBody):
    """`GET /v1/semantic_var/{var_id}`."""

    criteria: str | None = None


class TransformBody(SessionAuthBody, kw_only=True):
    """`POST /v1/transform`."""

    transform: str
    #: Id of the variable that is read.
    input: str
    #: Id of the variable that is written; one is made when it is not given.
    output: str | None = None
    func_name: str | None = None


class SamplingConfig(msgspec.Struct):
    """How an output is generated; the defaults are the original's."""

    temperature: Temperature | None = None
    top_p: Fraction | None = None
    max_gen_length: AtLeast1 | None = None
    ignore_tokenizer_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    stop_str: Stop | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    n: int | None = None
    best_of: int | None = None
    logit_bias: LogitBias | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    #: Ours: the same seed gives the same text.
    seed: Seed | None = None


class Parameter(msgspec.Struct):
    """One placeholder of a template."""

    name: str
    is_output: bool = False
    var_id: str | None = None
    value: str | None = None
    sampling_config: SamplingConfig | None = None


class SemanticCallBody(msgspec.Struct):
    """`POST /v1/semantic_call`."""

    session_id: SessionId
    template: str
    parameters: Annotated[list[Parameter], Meta(max_length=MAX_PARAMETERS)]
    #: The client does not send it; checked when it is there.
    session_auth: str | None = None
    func_name: str | None = None
    models: Annotated[list[str], Meta(max_length=MAX_MODELS)] | None = None
    model_type: str | None = None
    output_criteria: str | None = None
    # NOTE: these three say how the original was to compute, not what. Here text behind the last
    # output is never sent, a prompt is always filled in one go, and a prefix is found again as
    # long as there is memory for it.
    remove_pure_fill: bool | None = None
    fuse_fill: bool | None = None
    cache_prefix: bool | None = None


def session_number(value: SessionId, param: str = "session_id") -> int:
    """The id of a session, from an integer or its digits.

    Raises:
        InvalidRequestError: it is neither.
    """
    if isinstance(value, int):
        return value
    if not (value.isascii() and value.isdigit() and len(value) <= 64):
        raise invalid_value(param, "expected an integer.")
    return int(value)


def check_call(body: SemanticCallBody) -> None:
    """Check what the types cannot.

    Raises:
        InvalidRequestError: naming the field.
    """
    check_function_name(body.func_name)
    check_choice("model_type", body.model_type, MODEL_TYPES)
    names: set[str] = set()
    for index, parameter in enumerate(body.parameters):
        where = f"parameters[{index}]"
        if parameter.name in names:
            raise invalid_value(where, f"the name '{parameter.name[:64]}' is there twice.")
        names.add(parameter.name)
        if parameter.is_output:
            if parameter.value is not None:
                raise invalid_value(f"{where}.value", "an output has no value of its own.")
            _check_sampling(parameter.sampling_config, f"{where}.sampling_config")
        else:
            if (parameter.var_id is None) == (parameter.value is None):
                raise invalid_value(where, "an input has either 'var_id' or 'value'.")
            if parameter.sampling_config is not None:
                raise invalid_value(f"{where}.sampling_config", "only an output is generated.")


def check_function_name(name: str | None) -> None:
    """Check the name of a call in drawings, which is kept as long as its graph.

    Raises:
        InvalidRequestError: it is too long, or would break a terminal.
    """
    if name and (len(name) > MAX_NAME or not name.isprintable()):
        raise invalid_value("func_name", f"at most {MAX_NAME} printable characters.")


def _check_sampling(config: SamplingConfig | None, where: str) -> None:
    if config is None:
        return
    # 0.0 is the original's way to write "off".
    if config.repetition_penalty:
        check_range(f"{where}.repetition_penalty", config.repetition_penalty, 0.01, 100)
    if config.length_penalty not in (None, 0.0, 1.0):
        raise _unsupported(f"{where}.length_penalty", "it ranks beams, and there are none")
    for name in ("n", "best_of"):
        if getattr(config, name) not in (None, 1):
            raise _unsupported(f"{where}.{name}", "a variable has one value")


def check_token_ids(config: SamplingConfig, vocab_size: int, where: str) -> None:
    """Check what only the model's description can show to be wrong.

    Raises:
        InvalidRequestError: an id is not in its vocabulary; names the field.
    """
    field_checks.check_token_ids(f"{where}.stop_token_ids", config.stop_token_ids, vocab_size)
    try:
        field_checks.logit_bias_of(config.logit_bias, vocab_size)
    except InvalidRequestError as error:
        error.param = f"{where}.logit_bias"
        raise


def sampling_fields(config: SamplingConfig | None, *, is_own: bool) -> dict[str, Any]:
    """The fields of an ordinary call, other than the one for its length.

    What is off is left out, so that upstreams need not know of it.

    Args:
        config: checked.
        is_own: for a model of our own engines; these get values that are off, since what is
            left out is taken from the checkpoint's recommendations.
    """
    config = config or SamplingConfig()
    fields: dict[str, Any] = {
        "temperature": 1.0 if config.temperature is None else config.temperature,
        "top_p": 1.0 if config.top_p is None else config.top_p,
    }
    penalty = config.repetition_penalty or 1.0
    if is_own or penalty != 1.0:
        fields["repetition_penalty"] = penalty
    optional = {
        "ignore_eos": config.ignore_tokenizer_eos,
        "stop_token_ids": config.stop_token_ids,
        "stop": _stop(config.stop_str),
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "logit_bias": config.logit_bias,
    }
    fields |= {name: value for name, value in optional.items() if value}
    if config.seed is not None:
        fields["seed"] = config.seed
    return fields


def max_tokens(config: SamplingConfig | None) -> int:
    """Tokens that an output may have."""
    given = config.max_gen_length if config is not None else None
    return DEFAULT_MAX_TOKENS if given is None else given


def _stop(stop: str | Sequence[str] | None) -> str | list[str] | None:
    if stop is None or isinstance(stop, str):
        return stop
    return [text for text in stop if text]


def _unsupported(field: str, reason: str) -> UnsupportedError:
    return UnsupportedError(f"Unsupported parameter: '{field}': {reason}.", param=field)
