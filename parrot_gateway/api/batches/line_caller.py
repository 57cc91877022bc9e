"""Answers lines of batches by the ordinary routes, as requests without a client."""

from __future__ import annotations

import logging

import msgspec
from parrot_scheduler.task import THROUGHPUT

from parrot_gateway.batches.lines import LineAnswer, single_line
from parrot_gateway.batches.runner import LineRequest
from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.exceptions import AnswerError, GatewayError
from parrot_gateway.http.dispatch import Handler, internal_error
from parrot_gateway.http.exchange import JSON, Exchange, Headers, Message, Scope
from parrot_gateway.telemetry.call_record import CallRecords

logger = logging.getLogger(__name__)

#: Behind all that somebody waits for; the scheduler tells no lower ones apart.
LOWEST_PRIORITY = -100
#: A longer answer is not kept.
_MAX_ANSWER_BYTES = 64 * 1024 * 1024


class LineCaller:
    """See `parrot_gateway.batches.runner.AnswerLine`.

    Args:
        handler: answers an exchange.
        calls: get the records of calls.
    """

    def __init__(self, handler: Handler, calls: CallRecords) -> None:
        self._handler = handler
        self._calls = calls

    async def __call__(self, call: LineRequest) -> LineAnswer:
        answer = _Answer()
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": call.url,
            "raw_path": call.url.encode(),
            "query_string": b"",
            "headers": [JSON, (b"accept", b"application/json")],
        }

        async def receive() -> Message:
            return {"type": "http.request", "body": call.body, "more_body": False}

        exchange = Exchange(scope, receive, answer.send)
        exchange.tenant = call.tenant
        exchange.metadata = CallMetadata(
            tenant=call.tenant,
            application=call.batch_id,
            objective=THROUGHPUT,
            priority=LOWEST_PRIORITY,
        )
        record = exchange.record
        record.batch = call.batch_id
        exchange.begin_call(self._calls, call.url)
        try:
            await self._handler(exchange)
        except GatewayError as error:
            answer.fail(error)
            record.fail(error)
            record.status = error.status
        except Exception:
            logger.exception("%s: a line of %s failed", exchange.request_id, call.batch_id)
            unknown = internal_error(exchange.request_id)
            answer.fail(unknown)
            record.fail(unknown)
            record.status = unknown.status
        finally:
            exchange.finish()
            record.end()
        return answer.line_answer(exchange.request_id)


class _Answer:
    def __init__(self) -> None:
        self._status = 500
        self._headers: Headers = []
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Take an ASGI message of the answer."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message["headers"]
            return
        self._body += message.get("body", b"")
        if len(self._body) > _MAX_ANSWER_BYTES:
            raise AnswerError("the answer is too long to be kept")

    def fail(self, error: GatewayError) -> None:
        """The answer is an error, whatever has come of it before."""
        self._status, self._headers = error.status, error.headers()
        self._body[:] = error.body()

    def line_answer(self, request_id: str) -> LineAnswer:
        body = single_line(bytes(self._body))
        if body is None:
            status = self._status if self._status >= 300 else 502
            error = AnswerError("the model's server did not answer with JSON")
            return LineAnswer(status, request_id, error.body())
        return LineAnswer(self._status, request_id, body, _retry_after_s(self._headers))


def _retry_after_s(headers: Headers) -> float | None:
    for name, value in headers:
        if name.lower() == b"retry-after":
            try:
                return max(0.0, msgspec.json.decode(value, type=float))
            except msgspec.DecodeError:
                return None
    return None
