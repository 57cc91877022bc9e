"""Decodes request bodies and checks them, with errors worded as OpenAI's.

Everything raised here is a 400 that names the field in `param`. Which fields exist is in `types`;
what they become is decided by the modules of each kind of request.
"""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from parrot_engine.protocol import EngineInfo, Grammar, SamplingParams

from parrot_gateway.exceptions import (
    ContextLengthError,
    InvalidRequestError,
    UnsupportedError,
    invalid_value,
    long_array,
    missing_parameter,
    wrong_type,
)
from parrot_gateway.generation.requests.types import SamplingFields

MIN_TOP_P = 1e-9
#: Bodies up to this size are decoded in the event loop: within a millisecond, or some where most of
#: it is small objects.
MAX_INLINE_BYTES = 256 * 1024

_Body = TypeVar("_Body", bound=msgspec.Struct)
_Result = TypeVar("_Result")
_Value = TypeVar("_Value")

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUE = msgspec.json.Decoder(msgspec.Raw)
# Pairs first, so that only halves without their other half are left.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)

_TYPE_ERROR = re.compile(r"Expected `(?P<wanted>.+)`, got `(?P<got>.+)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.+?)`", re.DOTALL)
_LIMIT = re.compile(r"Expected `(\w+)` (of length )?(>=|<=) (\S+)")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"Object missing required field `(?P<field>.+)`", re.DOTALL)
_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


class _CollectorPause:
    """Keeps the garbage collector from walking again and again what is being decoded.

    Takes an eighth of the time of a body of millions of small objects, none of them in a cycle.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._was_enabled = True

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._was_enabled:
                gc.enable()


_collector_pause = _CollectorPause()


async def in_thread_if_large(
    read: Callable[[], _Result], num_bytes: int, inline_bytes: int = MAX_INLINE_BYTES
) -> _Result:
    """Call `read`, which reads a body of that size, in a thread if the body is large.

    A cancelled wait leaves the thread to finish.
    """
    return read() if num_bytes <= inline_bytes else await asyncio.to_thread(read)


def decode(body: bytes, decoder: msgspec.json.Decoder[_Value]) -> _Value:
    """The body as a typed object. Call it in a thread for more than `MAX_INLINE_BYTES`.

    Raises:
        InvalidRequestError: not JSON, or a field of a wrong type.
    """
    try:
        # NOTE: msgspec does not look into what it skips, such as the names of unknown fields.
        if not body.isascii():
            body.decode()
        if len(body) <= MAX_INLINE_BYTES:
            return decoder.decode(body)
        with _collector_pause:
            return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), body) from None
    except RecursionError:
        raise nested_too_deeply() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(error) from None


class BodyDecoder(Generic[_Body]):
    """Decodes the bodies of one kind of request, and names the fields that it does not know.

    Args:
        body: their type.
        also: names of further fields, which are read elsewhere.
    """

    def __init__(self, body: type[_Body], also: Iterable[str] = ()) -> None:
        own = [name for name in also if name not in body.__struct_fields__]
        fields = [(name, msgspec.Raw, msgspec.Raw()) for name in own]
        strict = msgspec.defstruct(
            body.__name__, fields, bases=(body,), forbid_unknown_fields=True, kw_only=True
        )
        self._known = frozenset(strict.__struct_fields__)
        self._strict: msgspec.json.Decoder[_Body] = msgspec.json.Decoder(strict)
        self._lenient = msgspec.json.Decoder(body)

    def decode(self, body: bytes) -> tuple[_Body, Sequence[str]]:
        """The body, and the names of its unknown fields.

        Raises:
            InvalidRequestError: as `decode`.
        """
        try:
            # NOTE: most bodies have known fields only, for which this is the whole work.
            return decode(body, self._strict), ()
        except InvalidRequestError as error:
            if error.code != "unknown_parameter":
                raise
        typed = decode(body, self._lenient)
        _, fields = read_object(body)
        return typed, [name for name in fields if name not in self._known]


def read_object(body: bytes) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """The body, with lone surrogates replaced, and its fields, undecoded.

    Raises:
        InvalidRequestError: it is no JSON object or not valid UTF-8.
    """
    return _read_raw(body, _OBJECT)


def read_value(body: bytes) -> tuple[bytes, msgspec.Raw]:
    """The same of any JSON value."""
    return _read_raw(body, _VALUE)


def _read_raw(body: bytes, decoder: msgspec.json.Decoder[_Value]) -> tuple[bytes, _Value]:
    try:
        # NOTE: msgspec does not look into what it leaves raw.
        if not body.isascii():
            body.decode()
        try:
            return body, decoder.decode(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            # Some clients send what was cut in two.
            mended = mend_surrogates(body)
            return mended, decoder.decode(mended)
    except msgspec.ValidationError:
        raise _explain("", body) from None
    except RecursionError:
        raise nested_too_deeply() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(error) from None


def mend_surrogates(document: bytes) -> bytes:
    """A JSON document with escapes of lone surrogates replaced by that of U+FFFD; linear."""
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match["lone"] else match[0], document)


def _not_json(error: Exception) -> InvalidRequestError:
    reason = "it is not valid UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
    return InvalidRequestError(f"We could not parse the JSON body of your request: {reason}.")


def nested_too_deeply(name: str | None = None) -> InvalidRequestError:
    """The error for JSON with too many levels; `name`: of a field."""
    what = "The JSON body of your request" if name is None else f"Invalid '{name}': it"
    return InvalidRequestError(f"{what} is nested too deeply.", param=name)


def _explain(message: str, body: bytes) -> InvalidRequestError:
    """msgspec's `… - at `$.messages[0].role`` in OpenAI's words.

    Args:
        body: holds the value at fault, which the message lacks.
    """
    text, _, path = message.partition(" - at `")
    _, of_keys, path = path.removesuffix("`").rpartition("key` in `")
    path = path.removeprefix("$")
    field = path.removeprefix(".").removesuffix("[...]") or None
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        name = unknown["field"][:80]
        return InvalidRequestError(
            f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter"
        )
    mismatch, missing = _TYPE_ERROR.fullmatch(text), _MISSING.fullmatch(text)
    if missing is not None:
        return missing_parameter(f"{field}.{missing['field']}" if field else missing["field"])
    if field is None:
        return InvalidRequestError("The JSON body of your request has to be an object.")
    if mismatch is not None:
        wanted = [part for part in mismatch["wanted"].split(" | ") if part != "null"]
        got = _TYPE_NAMES.get(mismatch["got"], mismatch["got"])
        kinds = " or ".join(_TYPE_NAMES.get(kind, kind) for kind in wanted)
        return wrong_type(field, f"{kinds}, but got {got} instead")
    limit = _LIMIT.fullmatch(text)
    if limit is not None:
        values = _values_at(body, path)
        if of_keys:
            values = [key for value in values for key in value]
        return _out_of_range(field, limit, values)
    return invalid_value(field, f"{text}.")


def _values_at(body: bytes, path: str) -> list[Any]:
    """The values that a path of msgspec's stands for: several, where it does not name a key."""
    found = [msgspec.json.decode(body)]
    for name, number in _STEP.findall(path):
        if name:
            found = [value[name] for value in found]
        elif number == "...":
            found = [item for value in found for item in value.values()]
        else:
            found = [value[int(number)] for value in found]
    return found


def _out_of_range(field: str, limit: re.Match[str], values: list[Any]) -> InvalidRequestError:
    kind, is_length, bound, number = limit.groups()
    if kind == "str":
        # One of several texts: the field is that of all.
        field = field.partition("[")[0]
    sizes = [len(value) if is_length else value for value in values]
    value = max(sizes) if bound == "<=" else min(sizes)
    if not is_length:
        return _outside(field, float(value) if kind == "float" else value, bound, float(number))
    if kind == "object":
        return InvalidRequestError(
            f"Invalid '{field}': {value} entries, at most {number} are allowed.",
            param=field,
            code="object_above_max_properties",
        )
    if kind == "array":
        return long_array(field, int(number), value)
    return InvalidRequestError(
        f"Invalid '{field}': string too long. Expected a string with maximum length {number}, but "
        f"got a string with length {value} instead.",
        param=field,
        code="string_above_max_length",
    )


def _outside(field: str, value: float, bound: str, limit: float) -> InvalidRequestError:
    kind = "integer" if isinstance(value, int) else "decimal"
    side, extreme = ("below", "minimum") if bound == ">=" else ("above", "maximum")
    shown = str(int(limit)) if float(limit).is_integer() else str(limit)
    return InvalidRequestError(
        f"Invalid '{field}': {kind} {side} {extreme} value. Expected a value {bound} {shown}, but "
        f"got {_shown(value)} instead.",
        param=field,
        code=f"{kind}_{side}_{extreme[:3]}_value",
    )


def check_range(
    name: str, value: float | None, low: float | None = None, high: float | None = None
) -> None:
    """Refuse a number outside `low`..`high`, both allowed; None is the field left out.

    Raises:
        InvalidRequestError: it is outside.
    """
    if value is not None and low is not None and not value >= low:
        raise _outside(name, value, ">=", low)
    if value is not None and high is not None and not value <= high:
        raise _outside(name, value, "<=", high)


def _shown(value: float) -> str:
    # NOTE: str() of an integer of thousands of digits raises.
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    return str(value)


def check_choice(name: str, value: str | None, allowed: Iterable[str]) -> None:
    """Refuse a word that is not one of `allowed`.

    Raises:
        InvalidRequestError: it is not.
    """
    if value is not None and value not in allowed:
        raise InvalidRequestError(
            f"Invalid value for '{name}': '{value[:64]}'. Supported values are: "
            + ", ".join(f"'{word}'" for word in allowed)
            + ".",
            param=name,
            code="invalid_value",
        )


def refuse(body: Any, names: Iterable[str], why: str) -> None:
    """Refuse fields that would change the answer in a way not offered here.

    Null, false and empty values pass.

    Raises:
        UnsupportedError: naming the first such field.
    """
    for name in names:
        value = getattr(body, name)
        if value is None or value is False or value in ("", [], {}):
            continue
        raise UnsupportedError(f"Unsupported parameter: '{name}' {why}.", param=name)


#: Other servers' extensions that change the output and are not offered here.
_EXTENSIONS = (
    "include_stop_str_in_output",
    "prompt_embeds",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "use_beam_search",
)


def check_sampling(body: SamplingFields, info: EngineInfo) -> None:
    """Check all that completions and chat have in common.

    Raises:
        InvalidRequestError: naming the first field at fault.
    """
    refuse(body, _EXTENSIONS, "is not supported with this model")
    check_token_ids("stop_token_ids", body.stop_token_ids, info.vocab_size)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )


def check_token_ids(name: str, token_ids: Sequence[int] | None, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        InvalidRequestError: naming the field and the id.
    """
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise invalid_value(
                name,
                f"{_shown(token_id)} is not a token id of this model, whose vocabulary has "
                f"{vocab_size} tokens.",
            )


def logit_bias_of(value: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    """`logit_bias` with numbers as keys.

    Raises:
        InvalidRequestError: a key that is no token id of this model.
    """
    if not value:
        return None
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 18):
            raise InvalidRequestError(
                f"Invalid key in 'logit_bias': '{key[:32]}'. Keys are token ids, written as "
                "strings.",
                param="logit_bias",
                code="invalid_value",
            )
        check_token_ids("logit_bias", (int(key),), vocab_size)
        biases[int(key)] = bias
    return biases


def sampling_of(
    body: SamplingFields,
    info: EngineInfo,
    *,
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """The engine's parameters for a checked body.

    What the caller leaves open is taken from the checkpoint's generation config, as its makers
    recommend, and else from OpenAI's defaults.

    Raises:
        InvalidRequestError: `logit_bias`, or `min_tokens` above `max_tokens`.
    """
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise invalid_value(
            "min_tokens",
            f"{body.min_tokens} is more than the {max_tokens} tokens that may be generated.",
        )
    recommended = info.default_sampling

    def chosen(value: float | None, name: str, default: float) -> float:
        return value if value is not None else float(recommended.get(name, default))

    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=chosen(body.temperature, "temperature", 1.0),
        # OpenAI's 0 leaves the likeliest token, as any small enough nucleus does.
        top_p=max(chosen(body.top_p, "top_p", 1.0), MIN_TOP_P),
        # vLLM's -1 is our 0: off.
        top_k=max(0, int(chosen(body.top_k, "top_k", 0))),
        min_p=chosen(body.min_p, "min_p", 0.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=chosen(body.repetition_penalty, "repetition_penalty", 1.0),
        logit_bias=logit_bias_of(body.logit_bias, info.vocab_size),
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs,
        grammar=grammar,
        stop=tuple(text for text in stop if text),
    )


def default_max_tokens(info: EngineInfo, room: int) -> int:
    """Tokens of an answer whose caller sets no limit: what the checkpoint's makers recommend, as
    far as there is `room`, else all of that."""
    recommended = info.default_sampling.get("max_new_tokens")
    return room if recommended is None else max(1, min(room, int(recommended)))


def check_context(
    limit: int,
    prompt: int,
    completion: int | None,
    *,
    param: str,
    noun: str,
    completion_param: str | None = None,
) -> None:
    """Refuse what does not fit the model's context.

    Args:
        limit: the model's, in tokens.
        prompt: tokens of the prompt.
        completion: tokens that may be generated; None for as many as fit, but one at least.
        param: the field that holds the prompt.
        noun: what the prompt is called: `messages` or `prompt`.
        completion_param: the field that sets `completion`; at fault where the prompt alone fits.

    Raises:
        ContextLengthError: it does not fit.
    """
    if completion is None:
        if prompt + 1 > limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, your {noun} "
                f"resulted in {prompt} tokens. Please reduce the length of the {noun}.",
                param=param,
            )
        return
    if prompt + completion > limit:
        field = f" ('{completion_param}')" if completion_param else ""
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{_shown(prompt + completion)} tokens ({prompt} in the {noun}, {_shown(completion)} "
            f"in the completion). Please reduce the length of the {noun} or completion{field}.",
            param=param if prompt >= limit else completion_param or param,
        )
