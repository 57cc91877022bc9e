"""`POST /v1/responses`, and the counting of its input tokens, for models of our own engines.

The earlier turns (`previous_response_id`, `conversation`) and the new input are rendered as one
chat and tokenized whole; the engine finds what it knows of it in its prefix cache. What is kept
afterwards is read by the routes of `stored`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from parrot_gateway.api.event_stream import stream_call
from parrot_gateway.api.ignored_fields import name_ignored
from parrot_gateway.api.openai.answers import encode
from parrot_gateway.api.responses.answer import Keep, ResponseAnswer
from parrot_gateway.api.responses.background import StartObserver, make
from parrot_gateway.api.responses.bodies import (
    LOGPROBS,
    PACKED_REASONING,
    InputFields,
    ResponseBody,
    check_input_fields,
    check_response,
    response_output,
)
from parrot_gateway.api.responses.events import NO_EVENTS, EventWriter
from parrot_gateway.api.responses.input_items import check_outputs
from parrot_gateway.api.responses.prompt import History, prompt_of, read_input
from parrot_gateway.api.semantic.recorded_exchange import RecordedExchange
from parrot_gateway.api.streams.follow import answer_with_events
from parrot_gateway.backends.own.generate import Generation
from parrot_gateway.backends.own.placement import Placer
from parrot_gateway.calls.event_log import EventLog
from parrot_gateway.calls.fifo_lock import wait_granted
from parrot_gateway.calls.generation_request import GenerationRequest
from parrot_gateway.calls.metadata import salt_of
from parrot_gateway.calls.observer import GenerationObserver
from parrot_gateway.calls.requests.call import BodyDecoder
from parrot_gateway.calls.requests.chat import chat_generation
from parrot_gateway.calls.requests.grammars import ignored_formats
from parrot_gateway.calls.requests.prepared import check_sampling
from parrot_gateway.calls.requests.response_tools import client_names, response_tools, shown_tools
from parrot_gateway.calls.responses.background import BackgroundTasks
from parrot_gateway.calls.responses.items import Item, Turn, history_of, mint_response_id
from parrot_gateway.calls.responses.store import Cut, ResponseStore, StoredResponse
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.settings.model import ServerSettings
from parrot_gateway.telemetry.call_record import CallObserver, CallRecord

_RESPONSE = BodyDecoder(ResponseBody, ("parrot",))
_INPUT = BodyDecoder(InputFields)


async def handle_responses(
    exchange: Exchange,
    placer: Placer,
    requested_model: str,
    body: bytes,
    server: ServerSettings,
    *,
    store: ResponseStore,
    background: BackgroundTasks,
    recorded: RecordedExchange | None,
) -> None:
    """Answer one call. A call that fails or is cancelled leaves its conversation as it was and,
    unless it was made in the background, no response behind.

    Args:
        exchange: its body has been read, and is `body`.
        placer: the engines of its model.
        requested_model: as the request names it.
        server: bounds and deadlines.
        store: what earlier calls left, and where this one's response goes.
        background: takes calls that need no client.
        recorded: of the call, in the session that it names.

    Raises:
        GatewayError: nothing has been sent yet; a stream's later failures are reported in band.
    """
    request, unknown = _RESPONSE.decode(body)
    check_response(request)
    check_sampling(request, placer.info)
    name_ignored(exchange, (*unknown, *ignored_formats([request.text, request.tools])))
    history, items = read_input(request, store, exchange.tenant)
    check_outputs(history_of(history.turn), items)
    exchange.cancel_on_disconnect()
    deadline = exchange.started + server.call_timeout_s
    call = _ResponseCall(
        placer,
        requested_model,
        request,
        store,
        exchange.tenant,
        history,
        items,
        len(body),
        exchange.record,
        recorded,
    )
    if request.background:
        background.check_room()
        log, answer = await call.begin(background, deadline)
        if request.stream:
            await answer_with_events(exchange, log, 0, server.keep_alive_s)
        else:
            await exchange.respond(200, answer)
        return
    async with call.turn(deadline):
        await call.answer(exchange, deadline, server.keep_alive_s)


async def handle_input_tokens(
    exchange: Exchange, placer: Placer, body: bytes, store: ResponseStore
) -> None:
    """Answer `{object, input_tokens}`: the length of the prompt that a response would have.

    Raises:
        GatewayError: as `handle_responses`.
    """
    request, unknown = _INPUT.decode(body)
    name_ignored(exchange, unknown)
    check_input_fields(request)
    history, items = read_input(request, store, exchange.tenant)
    earlier = history_of(history.turn)
    check_outputs(earlier, items)
    tools = response_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    shown = () if tools is None else tools.tools
    prompt = await prompt_of(request, placer, earlier + items, shown, len(body), room=1)
    answer = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
    await exchange.respond(200, encode(answer))


@dataclass(eq=False)
class _ResponseCall:
    """One call, from its prompt to its answer."""

    placer: Placer
    #: As the request names it.
    model: str
    request: ResponseBody
    store: ResponseStore
    tenant: str
    history: History
    items: list[Item]
    #: Of the body.
    num_bytes: int
    record: CallRecord
    recorded: RecordedExchange | None

    def __post_init__(self) -> None:
        request, recorded = self.request, self.recorded
        self._id = self.record.response_id = mint_response_id()
        if recorded is not None:
            recorded.answered_as(self._id)
        self._observers: list[GenerationObserver] = [CallObserver(self.record)]
        if recorded is not None:
            self._observers.append(recorded.call)
        self._wants_logprobs = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
        self._output = response_output(request, self.placer)

    @asynccontextmanager
    async def turn(self, deadline: float) -> AsyncIterator[None]:
        """While no other call is on its conversation, if it has one."""
        conversation = self.history.conversation
        if conversation is None:
            yield
            return
        who = f"conversation '{conversation.id}'"
        lock_request = conversation.lock.request(who)
        try:
            await wait_granted(lock_request, deadline - time.perf_counter(), who)
            yield
        finally:
            conversation.lock.release(lock_request)

    async def answer(self, exchange: Exchange, deadline: float, keep_alive_s: float) -> None:
        """Generate and answer, in its turn."""
        generation_request = await self._generation_request()
        turn, is_streamed = self.history.turn, bool(self.request.stream)
        self.record.streamed = is_streamed

        def keep(answer: dict[str, Any], output: Sequence[Item], cuts: Sequence[Cut]) -> None:
            added = self._added(turn, output)
            if self.request.store is not False:
                response = StoredResponse(self._id, encode(answer), added, cuts)
                self.store.keep(self.tenant, response, time.time())

        writer = EventWriter() if is_streamed else EventWriter(NO_EVENTS)
        answer = self._answer(generation_request, keep, writer)
        generation = Generation(self.placer, generation_request, deadline, self._observers)
        if is_streamed:
            await stream_call(exchange, generation, answer, keep_alive_s)
            return
        await exchange.respond(200, encode(await _finished(generation, answer)))

    async def begin(self, tasks: BackgroundTasks, deadline: float) -> tuple[EventLog, bytes]:
        """Begin to make it in the background; returns its events, and the answer as it is now."""
        generation_request = await self._generation_request()
        log, turn, tenant = EventLog(), self.history.turn, self.tenant
        writer = EventWriter(log=log)
        begun = self._begun(generation_request)
        queued = {**begun, "status": "queued"}
        stored = StoredResponse(self._id, encode(queued), Turn(turn, self.items), log=log)
        added: Turn | None = None

        def keep(whole: dict[str, Any], output: Sequence[Item], cuts: Sequence[Cut]) -> None:
            nonlocal added
            added = self._added(self.history.turn, output)

        def start() -> None:
            answer.begin()
            self.store.update(tenant, stored, encode(begun))

        def end(whole: dict[str, Any]) -> None:
            stored.cancel = None
            log.close()
            if self.recorded is not None:
                self.recorded.call.finish()
            ended = encode(whole)
            self.store.update(tenant, stored, ended, added)
            if (content := self.record.wanted_content()) is not None:
                content.answered(ended)
            self.record.status = self.record.status or 200
            self.record.end()

        async def generate() -> dict[str, Any]:
            async with self.turn(deadline):
                current = generation_request
                if self.history.turn is not turn:
                    # Other calls have added to the conversation.
                    current = await self._generation_request()
                observers = [StartObserver(start), *self._observers]
                return await _finished(
                    Generation(self.placer, current, deadline, observers), answer
                )

        if self.recorded is not None:
            self.recorded.outlives_exchange = True
        self.record.deferred = True
        answer = self._answer(generation_request, keep, writer)
        writer.queue(queued)
        self.store.keep(tenant, stored, time.time())
        stored.cancel = tasks.start(
            make(self._id, answer, generate, end, self.record), self._id
        ).cancel
        # NOTE: a task that is cancelled before its first step never runs, and would not end this.
        await asyncio.sleep(0)
        return log, encode(queued)

    def _added(self, turn: Turn | None, output: Sequence[Item]) -> Turn:
        """The turn that this call adds to its history."""
        conversation = self.history.conversation
        if conversation is None:
            return Turn(turn, self.items, output)
        return self.store.extend(self.tenant, conversation, self.items, output)

    def _answer(
        self, generation_request: GenerationRequest, keep: Keep, writer: EventWriter
    ) -> ResponseAnswer:
        tools = self._output.tools
        return ResponseAnswer(
            self._begun(generation_request),
            self.placer.tokenizer,
            wants_logprobs=self._wants_logprobs,
            packs_reasoning=PACKED_REASONING in (self.request.include or ()),
            tools=client_names(self.request.tools),
            calls_only=tools is not None and tools.mode == "required",
            keep=keep,
            writer=writer,
        )

    async def _generation_request(self) -> GenerationRequest:
        """The request for an engine, with the history as it is now."""
        request, output = self.request, self._output
        turn, conversation = self.history.turn, self.history.conversation
        if conversation is not None:
            size = sum(item.size_bytes for item in self.items)
            self.store.check_fits(conversation, size)
        max_tokens = request.max_output_tokens
        whole = history_of(turn) + self.items
        prompt = await prompt_of(
            request, self.placer, whole, output.shown_tools, self.num_bytes, room=max_tokens or 1
        )
        return chat_generation(
            request,
            self.placer,
            prompt,
            output,
            max_tokens=max_tokens,
            logprobs=(request.top_logprobs or 0) if self._wants_logprobs else None,
            salt=salt_of(self.tenant),
            noun="input",
            completion_param="max_output_tokens",
        )

    def _begun(self, generation_request: GenerationRequest) -> dict[str, Any]:
        """The answer in progress."""
        request, conversation = self.request, self.history.conversation
        reasoning = request.reasoning or {}
        text_format = (request.text or {}).get("format") or {"type": "text"}
        return {
            "id": self._id,
            "object": "response",
            "created_at": float(int(time.time())),
            "status": "in_progress",
            "background": bool(request.background),
            "completed_at": None,
            "conversation": None if conversation is None else {"id": conversation.id},
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": generation_request.sampling.temperature,
            "text": {"format": text_format, "verbosity": "medium"},
            "tool_choice": request.tool_choice or "auto",
            "tools": shown_tools(request.tools),
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p
            if request.top_p is not None
            else generation_request.sampling.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "user": request.user,
        }


async def _finished(generation: Generation, answer: ResponseAnswer) -> dict[str, Any]:
    """Run a generation to its end; returns the whole answer."""
    with generation:
        while not generation.state.done:
            update = await generation.next()
            if update is not None:
                answer.events(update)
    return answer.finish(generation.state.usage)[0]
