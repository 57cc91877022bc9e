"""The log of the process: one format for everything, and one line for each call.

Lines of the gateway, its libraries and its engine processes go through the same processors, as text
for people or JSON for programs. They never contain a prompt, an answer or a key.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
import time
from collections import deque
from typing import Any, Final, Literal, NamedTuple, TextIO, TypeAlias

import msgspec

from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.key_hiding import hide_keys

LogFormat: TypeAlias = Literal["text", "json"]

#: Name of the logger of calls.
CALLS: Final = "parrot_gateway.calls"

_encoder = msgspec.json.Encoder()

#: Fields of every line in JSON.
COMMON_FIELDS: Final = ("timestamp", "level", "logger", "event", "exception")

#: Loggers that report every connection, at info or with its address: kept at warning or above.
_NOISY = ("uvicorn", "websockets", "urllib3")
#: Longest wait of a call's line in seconds, and maximum waiting lines.
_HELD_S = 0.05
_MAX_HELD = 64
#: Characters shown of a name that a client chose.
_MAX_NAME = 200
#: Values shown without quotes.
_PLAIN = re.compile(r"[^\s\"'=\\]+")


class CallLine(msgspec.Struct, omit_defaults=True):
    """The log line of one call. Unknown, empty and false fields are left out."""

    timestamp: str
    level: str
    logger: str
    event: str
    path: str
    status: int = -1
    duration_ms: float | None = None
    model: str | None = None
    served_model: str | None = None
    engine: str | None = None
    lost_engines: list[str] | None = None
    reason: str | None = None
    tried: tuple[str, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    waited_ms: float | None = None
    prepared_ms: float | None = None
    queued_ms: float | None = None
    first_token_ms: float | None = None
    finish_reason: str | None = None
    streamed: bool = False
    deferred: bool = False
    client_left: bool = False
    error_code: str | None = None
    error_message: str | None = None
    tenant: str = ""
    session: str | None = None
    batch: str | None = None
    call_id: str = ""
    request_id: str = ""


#: Fields of a call's line besides `COMMON_FIELDS`, in order.
CALL_FIELDS: Final = CallLine.__struct_fields__[4:]


def configure_logging(level: str, log_format: LogFormat, stream: TextIO | None = None) -> Log:
    """Write the log of this process to `stream` from now on.

    Args:
        level: debug, info, warning or error.
        stream: standard error by default.
    """
    log = Log(sys.stderr if stream is None else stream, log_format)
    handler = logging.StreamHandler(log)
    handler.setFormatter(_LineFormatter(log))
    logging.basicConfig(handlers=[handler], force=True)
    set_log_level(level)
    logging.captureWarnings(True)
    # NOTE: uvicorn logs this as an error for each engine refused with a 401; the link logs which
    # engine it was.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: "returned without completing handshake" not in record.getMessage()
    )
    return log


def log_uncaught() -> None:
    """Log an error that ends the process or a thread, instead of a raw traceback."""

    def log_exception(*exception: Any) -> None:
        kind, error, trace = exception
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            logging.getLogger("parrot_gateway").critical(
                "an error that nothing handles", exc_info=(kind, error, trace)
            )

    sys.excepthook = log_exception
    threading.excepthook = lambda args: log_exception(
        args.exc_type, args.exc_value, args.exc_traceback
    )


def set_log_level(level: str) -> None:
    """Set the log level."""
    logging.root.setLevel(level.upper())
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.root.level))


class _HeldCall(NamedTuple):
    """A call whose line is still to be written."""

    record: CallRecord
    #: Unix time of the line.
    at: float
    level: str
    event: str


class Log:
    """Carries lines of all loggers to a stream, in order and in one format.

    Lines of calls are made and written together after a moment: between other work of a call the
    same line takes four times as long, and a system call per line even longer. The standard
    library's handler writes to this as to a stream.
    """

    def __init__(self, stream: TextIO, log_format: LogFormat) -> None:
        self._stream = stream
        self._is_json = log_format == "json"
        self.stamp = _JsonTime() if self._is_json else _TextTime()
        #: Renders the fields of a line.
        self.render = _as_json if self._is_json else _as_text
        # NOTE: threads of libraries log too; a deque can be filled and emptied concurrently.
        self._held: deque[str | _HeldCall] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def call(self, record: CallRecord, level: str, event: str) -> None:
        """Write the line of an ended call within `_HELD_S`, or at once outside the event loop."""
        self._held.append(_HeldCall(record, time.time(), level, event))
        if len(self._held) >= _MAX_HELD:
            self.flush()
        elif self._timer is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                self.flush()
            else:
                self._timer = loop.call_later(_HELD_S, self._flush_late)

    def write(self, text: str) -> None:
        """Add text, which leaves with `flush`."""
        self._held.append(text)

    def flush(self) -> None:
        """Write the held lines."""
        texts = []
        while self._held:
            held = self._held.popleft()
            texts.append(held if isinstance(held, str) else self._line(held))
        if texts:
            self._stream.write("".join(texts))
            self._stream.flush()

    def _flush_late(self) -> None:
        self._timer = None
        self.flush()

    def _line(self, held: _HeldCall) -> str:
        line = _line_of(held.record, self.stamp.at(held.at), held.level, held.event)
        if self._is_json:
            return f"{_encoder.encode(line).decode()}\n"
        return f"{self.render(msgspec.to_builtins(line))}\n"


class _LineFormatter(logging.Formatter):
    """Gives lines of standard loggers the fields and format of the log."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "timestamp": self._log.stamp.at(time.time()),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": hide_keys(record.getMessage()),
        }
        if record.exc_info:
            fields["exception"] = hide_keys(self.formatException(record.exc_info))
        return self._log.render(fields)


class CallLog:
    """Logs a line for each call that has ended; a sink of `CallRecords`.

    Calls that failed through no fault of the caller are logged as warnings.

    Args:
        log: the log to write to.
        logs_all: true to log the others too, at info.
    """

    def __init__(self, log: Log, logs_all: bool) -> None:
        self._log = log
        self._logs_all = logs_all
        self._levels = logging.getLogger(CALLS)

    def __call__(self, record: CallRecord) -> None:
        if record.status >= 500 or (record.error_code is not None and record.status < 400):
            if self._levels.isEnabledFor(logging.WARNING):
                self._log.call(record, "warning", "call failed")
        elif self._logs_all and self._levels.isEnabledFor(logging.INFO):
            self._log.call(record, "info", "call")


def _line_of(record: CallRecord, timestamp: str, level: str, event: str) -> CallLine:
    started, ready = record.started, record.ready
    begun = started if ready is None else ready
    model, served_model = record.model, record.served_model
    return CallLine(
        timestamp,
        level,
        CALLS,
        event,
        record.path,
        status=record.status,
        duration_ms=_ms(started, record.ended),
        model=_short(model),
        served_model=None if served_model == model else _short(served_model),
        engine=record.engine,
        lost_engines=list(record.lost_engines) or None,
        reason=record.reason,
        tried=record.tried,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        waited_ms=_ms(started, ready),
        prepared_ms=_ms(begun, record.submitted),
        queued_ms=None if record.queued_s is None else round(record.queued_s * 1000, 3),
        first_token_ms=_ms(begun, record.first_token),
        finish_reason=record.finish_reason,
        streamed=record.streamed,
        deferred=record.deferred,
        client_left=record.client_left,
        error_code=record.error_code,
        error_message=record.error_message,
        tenant=record.tenant,
        session=record.session,
        batch=record.batch,
        call_id=record.call_id,
        request_id=record.request_id,
    )


def _ms(since: float, until: float | None) -> float | None:
    return None if until is None else round((until - since) * 1000, 3)


def _short(name: str | None) -> str | None:
    return None if name is None else name[:_MAX_NAME]


class _TextTime:
    """Local times to the millisecond."""

    def __init__(self) -> None:
        self._second, self._text = 0, ""

    def at(self, moment: float) -> str:
        """Format a Unix time."""
        second = int(moment)
        if second != self._second:
            self._second, self._text = second, self._written(second)
        return self._with_ms(self._text, int((moment - second) * 1000))

    def _written(self, second: int) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))

    def _with_ms(self, text: str, ms: int) -> str:
        return f"{text},{ms:03}"


class _JsonTime(_TextTime):
    """Formats UTC in ISO 8601."""

    def _written(self, second: int) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))

    def _with_ms(self, text: str, ms: int) -> str:
        return f"{text}.{ms:03}Z"


def _as_json(fields: dict[str, Any]) -> str:
    return _encoder.encode(fields).decode()


def _as_text(fields: dict[str, Any]) -> str:
    timestamp, level, name, text = (fields.pop(each) for each in COMMON_FIELDS[:4])
    trace = fields.pop("exception", None)
    line = f"{timestamp} {level.upper():7} {name}: {text}"
    line += "".join(f" {name}={_shown(value)}" for name, value in fields.items())
    return line if trace is None else f"{line}\n{trace}"


def _shown(value: object) -> str:
    """Format a value on one line; text with blanks or control characters is quoted."""
    if isinstance(value, list):
        value = ",".join(map(str, value))
    text = value if isinstance(value, str) else str(value)
    if _PLAIN.fullmatch(text) and text.isprintable():
        return text
    return msgspec.json.encode(text).decode() if text.isprintable() else ascii(text)
