"""Lines of batches in OpenAI's shapes: requests in, answers and errors out. No I/O except reading
open files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import msgspec

#: Routes that lines may call, in the order in which messages list them.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
#: Maximum reported faults of one batch.
MAX_ERRORS = 100
#: Maximum models named by the lines of one batch.
MAX_MODELS = 64
#: Maximum characters of a `custom_id`.
MAX_CUSTOM_ID = 512


class LineError(msgspec.Struct, frozen=True):
    """A fault in the input."""

    code: str
    message: str
    param: str | None = None
    #: Counted from 1.
    line: int | None = None


class LineUsage(msgspec.Struct, frozen=True):
    """Tokens of answers, summed."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: LineUsage) -> LineUsage:
        return LineUsage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


class BatchLine(NamedTuple):
    """One request of a batch."""

    #: Line number in the input, from 1.
    number: int
    custom_id: str
    model: str
    #: JSON.
    body: bytes


class Validation(NamedTuple):
    """The result of reading an input file."""

    total: int
    errors: list[LineError]
    #: Number of the first line that names each model.
    models: dict[str, int]


class _Head(msgspec.Struct):
    """Fields that decide about a body. They accept any type, so that each fault has its own
    message.
    """

    model: Any = None
    stream: Any = None
    background: Any = None
    parrot: Any = None


_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_head_decoder = msgspec.json.Decoder(_Head)
_any_decoder = msgspec.json.Decoder()
_NULL = msgspec.Raw(b"null")


def parse_line(raw: bytes, number: int, endpoint: str) -> BatchLine | LineError:
    """Parse a line of the input.

    Args:
        raw: the line, not blank.
        endpoint: the batch's, which the line's `url` must equal.
    """
    try:
        # NOTE: msgspec does not check the UTF-8 of raw fields.
        raw.decode()
        fields = _fields_decoder.decode(raw)
        custom_id, method, url = (
            _any_decoder.decode(fields.get(name, _NULL)) for name in ("custom_id", "method", "url")
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LineError(
            "invalid_json_line", "This line is not parseable as a JSON object.", None, number
        )
    for name in ("custom_id", "method", "url", "body"):
        if name not in fields:
            return LineError(
                "missing_required_parameter", f"Missing required parameter: '{name}'.", name, number
            )
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        message = f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID} characters."
        return LineError("invalid_custom_id", message, "custom_id", number)
    if method != "POST":
        return LineError("invalid_method", "'method' must be 'POST'.", "method", number)
    if url != endpoint:
        message = f"'url' must be the batch's endpoint, '{endpoint}'."
        return LineError("mismatched_url", message, "url", number)
    head = _head_of(fields["body"])
    if head is None:
        return LineError("invalid_request", "'body' must be a JSON object.", "body", number)
    if not isinstance(head.model, str) or not head.model:
        message = "Missing required parameter: 'body.model'."
        return LineError("missing_required_parameter", message, "body.model", number)
    for name, value in (("stream", head.stream), ("background", head.background)):
        if value:
            message = f"'{name}' has no place in a batch, whose answers come in a file."
            return LineError("invalid_request", message, f"body.{name}", number)
    if head.parrot is not None:
        message = "Semantic fields ('parrot') have no place in a batch; they belong to sessions."
        return LineError("invalid_request", message, "body.parrot", number)
    return BatchLine(number, custom_id, head.model, bytes(fields["body"]))


def _head_of(body: msgspec.Raw) -> _Head | None:
    try:
        return _head_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def raw_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines of a file with their numbers. A longer line than `max_bytes` is cut
    to `max_bytes` + 1 bytes.
    """
    number = 0
    while raw := file.readline(max_bytes + 1):
        number += 1
        if len(raw) > max_bytes and not raw.endswith(b"\n"):
            yield number, raw
            while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
                pass
        elif raw := raw.strip():
            yield number, raw


def validate(file: BinaryIO, endpoint: str, *, max_lines: int, max_line_bytes: int) -> Validation:
    """Read an input file; reports at most the first `MAX_ERRORS` faults."""
    errors: list[LineError] = []
    seen: set[bytes] = set()
    models: dict[str, int] = {}
    total = 0
    for number, raw in raw_lines(file, max_line_bytes):
        total += 1
        if total > max_lines:
            message = f"The input file has more than {max_lines} requests."
            errors.append(LineError("too_many_requests", message, None, number))
            break
        if len(raw) > max_line_bytes:
            message = f"This line is longer than {max_line_bytes} bytes."
            line: BatchLine | LineError = LineError("line_too_long", message, None, number)
        else:
            line = parse_line(raw, number, endpoint)
        if isinstance(line, BatchLine):
            key = line.custom_id.encode("utf-8", "surrogatepass")
            if key in seen:
                message = (
                    f"The custom_id '{line.custom_id[:80]}' for this request is a duplicate of "
                    "another request. The custom_id parameter must be unique for each request in "
                    "a batch."
                )
                line = LineError("duplicate_custom_id", message, "custom_id", number)
            else:
                seen.add(key)
        if isinstance(line, BatchLine) and line.model not in models:
            if len(models) < MAX_MODELS:
                models[line.model] = number
            else:
                message = f"The requests name more than {MAX_MODELS} models."
                line = LineError("too_many_models", message, "body.model", number)
        if isinstance(line, LineError):
            errors.append(line)
            if len(errors) >= MAX_ERRORS:
                break
    if not total:
        message = "The input file is empty. Please ensure that it holds at least one request."
        errors.append(LineError("empty_file", message, "input_file_id"))
    return Validation(total, errors, models)


# -- answers -----------------------------------------------------------------------------------


class LineAnswer(NamedTuple):
    """A route's answer to a line."""

    status: int
    request_id: str
    #: JSON.
    body: bytes
    retry_after_s: float | None = None


class _Tokens(msgspec.Struct):
    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: Mapping[str, Any] | None = None
    input_tokens_details: Mapping[str, Any] | None = None
    completion_tokens_details: Mapping[str, Any] | None = None
    output_tokens_details: Mapping[str, Any] | None = None


class _Body(msgspec.Struct):
    usage: msgspec.Raw = _NULL


class _Response(msgspec.Struct):
    body: _Body | None = None


class _Written(msgspec.Struct):
    id: str
    response: _Response | None = None


_written_decoder = msgspec.json.Decoder(_Written)
_tokens_decoder = msgspec.json.Decoder(_Tokens)


def line_id(batch_id: str, number: int) -> str:
    """Return the id of a line's answer, by which a restarted gateway recognises it."""
    return f"batch_req_{batch_id.rpartition('_')[2]}_{number}"


def answer_line(batch_id: str, line: BatchLine, answer: LineAnswer) -> bytes:
    """Return a line of an output or error file."""
    return _encode_line(
        batch_id,
        line,
        {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": msgspec.Raw(answer.body),
        },
        None,
    )


def unanswered_line(batch_id: str, line: BatchLine, code: str, message: str) -> bytes:
    """Return a line of an error file for a request that was not made."""
    return _encode_line(batch_id, line, None, {"code": code, "message": message})


def _encode_line(
    batch_id: str, line: BatchLine, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    written = {
        "id": line_id(batch_id, line.number),
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(written) + b"\n"


def single_line(body: bytes) -> bytes | None:
    """Return JSON without line breaks; None if `body` is not a JSON object."""
    try:
        body.decode()
        if not body.lstrip().startswith(b"{"):
            return None
        return msgspec.json.format(body, indent=-1)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class WrittenLine(NamedTuple):
    """The contents of a line of an output or error file."""

    #: Number of the request in the input.
    number: int
    usage: LineUsage


def read_written(raw: bytes) -> WrittenLine | None:
    """Parse a written line; None if it is incomplete."""
    try:
        written = _written_decoder.decode(raw)
        number = int(written.id.rpartition("_")[2])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
    body = None if written.response is None else written.response.body
    return WrittenLine(number, LineUsage() if body is None else _usage_of(body.usage))


def _usage_of(raw: msgspec.Raw) -> LineUsage:
    try:
        tokens = _tokens_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        # The answer has no usage, or one of another shape.
        return LineUsage()
    given = tokens.prompt_tokens_details or tokens.input_tokens_details or {}
    made = tokens.completion_tokens_details or tokens.output_tokens_details or {}
    return LineUsage(
        tokens.prompt_tokens or tokens.input_tokens,
        _count_of(given, "cached_tokens"),
        tokens.completion_tokens or tokens.output_tokens,
        _count_of(made, "reasoning_tokens"),
    )


def _count_of(details: Mapping[str, Any], name: str) -> int:
    value = details.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
