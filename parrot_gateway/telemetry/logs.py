"""The log of the process: one format for everything, and one line for each call.

Lines of the gateway, of its libraries and of its engine processes go through the same processors,
as text for people or as JSON for programs. No prompt, no answer and no key is ever in them.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Literal, TextIO, TypeAlias

import msgspec
import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from parrot_gateway.telemetry.call_record import CallRecord

LogFormat: TypeAlias = Literal["text", "json"]

#: Name of the logger of calls.
CALLS: Final = "parrot_gateway.calls"

#: Fields of a call's line, in order. Those that are unknown, empty or false are left out.
CALL_FIELDS: Final = (
    "path", "status", "duration_ms", "model", "served_model", "engine", "reason", "prompt_tokens",
    "cached_tokens", "output_tokens", "waited_ms", "prepared_ms", "queued_ms", "first_token_ms",
    "finish_reason", "streamed", "deferred", "client_left", "error_code", "error_message", "tenant",
    "session", "batch", "call_id", "request_id",
)  # fmt: skip
#: Fields of every line in JSON.
COMMON_FIELDS: Final = ("timestamp", "level", "logger", "event", "exception")

#: Loggers that report every connection at info: never below warning.
_NOISY = ("uvicorn", "websockets")
#: Characters of a name that a client chose which are shown.
_MAX_NAME = 200
#: What looks like a key, in a message that an upstream wrote.
_KEY = re.compile(r"\b(sk-|[Bb]earer )[\w.~+/=-]{8,}")
#: What is shown without quotes.
_PLAIN = re.compile(r"[^\s\"'=\\]+")


def configure_logging(level: str, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Write the log of this process to `stream` from now on.

    Args:
        level: debug, info, warning or error.
        stream: standard error where none is given.
    """
    stream = sys.stderr if stream is None else stream
    renderer: Processor = _as_json if log_format == "json" else _as_text
    stamp = _JsonTime() if log_format == "json" else _TextTime()
    shared: list[Processor] = [structlog.stdlib.add_log_level, stamp]
    end: list[Processor] = [_without_keys, renderer]
    formatter = ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_logger_name,
            *shared,
            structlog.processors.format_exc_info,
        ],
        processors=[ProcessorFormatter.remove_processors_meta, *end],
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], force=True)
    set_log_level(level)
    logging.captureWarnings(True)
    # NOTE: uvicorn logs this as an error for each engine that is refused with a 401; the link logs
    # which one it was.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: "returned without completing handshake" not in record.getMessage()
    )
    # NOTE: not by way of the standard library's loggers, which take three times as long a line.
    structlog.configure(
        processors=[*shared, *end],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )


def set_log_level(level: str) -> None:
    """Log from that level on."""
    logging.root.setLevel(level.upper())
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.root.level))


class CallLog:
    """Logs a line for each call that has ended; a sink of `CallRecords`.

    Calls that failed by no fault of the caller are logged as warnings.

    Args:
        logs_all: whether to log the others too, at info; settings may change.
    """

    def __init__(self, logs_all: Callable[[], bool]) -> None:
        self._logs_all = logs_all
        self._levels = logging.getLogger(CALLS)
        self._logger: FilteringBoundLogger = structlog.get_logger().bind(logger=CALLS)

    def __call__(self, record: CallRecord) -> None:
        if record.status >= 500 or (record.error_code is not None and record.status < 400):
            if self._levels.isEnabledFor(logging.WARNING):
                self._logger.warning("call failed", **fields_of(record))
        elif self._logs_all() and self._levels.isEnabledFor(logging.INFO):
            self._logger.info("call", **fields_of(record))


def fields_of(record: CallRecord) -> dict[str, Any]:
    """The fields of a call's line."""
    started, ready = record.started, record.ready
    begun = started if ready is None else ready
    values = (
        record.path,
        record.status,
        _ms(started, record.ended),
        _short(record.model),
        None if record.served_model == record.model else _short(record.served_model),
        record.engine,
        record.reason,
        record.prompt_tokens,
        record.cached_tokens,
        record.output_tokens,
        _ms(started, ready),
        _ms(begun, record.submitted),
        None if record.queued_s is None else round(record.queued_s * 1000, 3),
        _ms(begun, record.first_token),
        record.finish_reason,
        record.streamed,
        record.deferred,
        record.client_left,
        record.error_code,
        record.error_message,
        record.tenant,
        record.session,
        record.batch,
        record.call_id,
        record.request_id,
    )
    return {
        name: value
        for name, value in zip(CALL_FIELDS, values, strict=True)
        if value is not None and value is not False and value != ""
    }


def _ms(since: float, until: float | None) -> float | None:
    return None if until is None else round((until - since) * 1000, 3)


def _short(name: str | None) -> str | None:
    return None if name is None else name[:_MAX_NAME]


class _TextTime:
    """Adds the local time to the millisecond."""

    def __init__(self) -> None:
        self._second, self._text = 0, ""

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second, self._text = second, self._written(second)
        event["timestamp"] = self._with_ms(self._text, int((now - second) * 1000))
        return event

    def _written(self, second: int) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))

    def _with_ms(self, text: str, ms: int) -> str:
        return f"{text},{ms:03}"


class _JsonTime(_TextTime):
    """Adds UTC in ISO 8601."""

    def _written(self, second: int) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))

    def _with_ms(self, text: str, ms: int) -> str:
        return f"{text}.{ms:03}Z"


def _without_keys(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for name in ("event", "error_message", "exception"):
        text = event.get(name)
        if isinstance(text, str) and ("sk-" in text or "earer " in text):
            event[name] = _KEY.sub(r"\1…", text)
    return event


def _as_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    first = {name: event.pop(name) for name in COMMON_FIELDS if name in event}
    return msgspec.json.encode({**first, **event}, enc_hook=str).decode()


def _as_text(logger: WrappedLogger, method: str, event: EventDict) -> str:
    head = [event.pop(name, "") for name in ("timestamp", "level", "logger", "event")]
    timestamp, level, name, text = head
    trace = event.pop("exception", None)
    line = f"{timestamp} {level.upper():7} {name}: {text}"
    if event:
        line += "".join(f" {name}={_shown(value)}" for name, value in event.items())
    return line if trace is None else f"{line}\n{trace}"


def _shown(value: object) -> str:
    """A value on one line: text in quotes where it has blanks or what a terminal obeys."""
    text = value if isinstance(value, str) else str(value)
    if _PLAIN.fullmatch(text) and text.isprintable():
        return text
    return msgspec.json.encode(text).decode() if text.isprintable() else ascii(text)
