"""`POST /v1/responses`, and the counting of its input tokens, for models of our own engines.

What was said before (`previous_response_id`, `conversation`) and the new input are rendered as one
chat and tokenized whole; the engine finds what it knows of it in its prefix cache. Only text. What
is kept afterwards is asked for by the routes of `stored`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import msgspec

from parrot_gateway.api.openai.answers import chat_logprobs, encode
from parrot_gateway.api.openai.sse import EventStream, run_stream
from parrot_gateway.api.responses.bodies import (
    LOGPROBS,
    InputFields,
    ResponseBody,
    check_input_fields,
    check_response,
    format_of,
    items_of,
    response_grammar,
)
from parrot_gateway.api.responses.events import (
    ResponseEvents,
    finished,
    output_message,
    output_text,
)
from parrot_gateway.api.responses.prompt import History, find_history, prompt_of
from parrot_gateway.exceptions import GatewayError, missing_parameter
from parrot_gateway.generation.fifo_lock import wait_granted
from parrot_gateway.generation.generate import Generation
from parrot_gateway.generation.placement import Placer
from parrot_gateway.generation.request import ChoiceDelta, GenerationRequest, PromptFilled, Update
from parrot_gateway.generation.requests.validation import (
    check_context,
    check_sampling,
    decode,
    sampling_of,
)
from parrot_gateway.generation.responses.items import (
    Item,
    Part,
    Turn,
    history_of,
    mint_item_id,
    mint_response_id,
)
from parrot_gateway.generation.responses.store import Cut, ResponseStore, StoredResponse
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.settings.model import ServerSettings

_RESPONSE = msgspec.json.Decoder(ResponseBody)
_INPUT = msgspec.json.Decoder(InputFields)


async def handle_responses(
    exchange: Exchange,
    placer: Placer,
    requested_model: str,
    body: bytes,
    server: ServerSettings,
    *,
    store: ResponseStore,
    tenant: str,
    salt: str = "",
) -> None:
    """Answer one call; cancellation as in `handle_completions`. A call that fails or is cancelled
    leaves no response behind, and its conversation as it was.

    Args:
        store: what earlier calls left, and where this one's response goes.
        tenant: whose call it is.

    Others are as in `handle_completions`.

    Raises:
        GatewayError: nothing has been sent yet; a stream's later failures are reported in band.
    """
    request = decode(body, _RESPONSE)
    check_response(request)
    check_sampling(request, placer.info)
    items = items_of(request.input)
    history = find_history(request, store, tenant)
    if not items and history.is_empty:
        raise missing_parameter("input")
    exchange.cancel_on_disconnect(cast(asyncio.Task[Any], asyncio.current_task()))
    deadline = exchange.started + server.call_timeout_s

    async def answer() -> None:
        call = _ResponseCall(exchange, placer, requested_model, request, store, tenant, history)
        await call.answer(items, salt, deadline, len(body), server.keep_alive_s)

    conversation = history.conversation
    if conversation is None:
        await answer()
        return
    who = f"conversation '{conversation.id}'"
    lock_request = conversation.lock.request(who)
    try:
        await wait_granted(lock_request, deadline - time.perf_counter(), who)
        await answer()
    finally:
        conversation.lock.release(lock_request)


async def handle_input_tokens(
    exchange: Exchange,
    placer: Placer,
    body: bytes,
    *,
    store: ResponseStore,
    tenant: str,
) -> None:
    """Answer `{object, input_tokens}`: the length of the prompt that a response would have.

    Raises:
        GatewayError: as `handle_responses`.
    """
    request = decode(body, _INPUT)
    check_input_fields(request)
    items = items_of(request.input)
    history = find_history(request, store, tenant)
    if not items and history.is_empty:
        raise missing_parameter("input")
    whole = history_of(history.turn) + items
    prompt = await prompt_of(request, placer, whole, len(body), room=1)
    answer = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
    await exchange.respond(200, encode(answer))


class _ResponseCall:
    """One call, from its prompt to its answer."""

    def __init__(
        self,
        exchange: Exchange,
        placer: Placer,
        model: str,
        request: ResponseBody,
        store: ResponseStore,
        tenant: str,
        history: History,
    ) -> None:
        self._exchange = exchange
        self._placer = placer
        self._model = model
        self._request = request
        self._store = store
        self._tenant = tenant
        self._history = history
        #: The history as it was when this call began.
        self._turn = history.turn
        self._id = mint_response_id()
        self._item_id = mint_item_id()
        self._wants_logprobs = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._cuts: list[Cut] = []
        self._finish_reason = "stop"
        self._grammar, self._grammar_param = response_grammar(request, placer.info)

    async def answer(
        self,
        items: list[Item],
        salt: str,
        deadline: float,
        num_bytes: int,
        keep_alive_s: float,
    ) -> None:
        """Generate and answer."""
        conversation = self._history.conversation
        if conversation is not None:
            self._store.check_fits(conversation, sum(item.size_bytes for item in items))
        generation_request = await self._ask(items, salt, num_bytes)
        generation = Generation(self._placer, generation_request, deadline)
        begun = self._begun(generation_request)
        if not self._request.stream:
            with generation:
                while not generation.state.done:
                    self._take(await generation.next())
            ended = self._end(begun, items, generation)
            await self._exchange.respond(200, encode(ended))
            return
        events = ResponseEvents(begun, self._item_id)

        def show(update: Update) -> bytes:
            cut = self._take(update)
            if cut is None:
                return b""
            opening = b"" if events.opened else b"".join(events.opening())
            logprobs = self._logprobs[len(self._logprobs) - cut.logprobs :]
            return opening + events.delta(self._texts[-1], logprobs)

        def close() -> bytes:
            opening = b"" if events.opened else b"".join(events.opening())
            return opening + b"".join(events.closing(self._end(begun, items, generation)))

        stream = _ResponseStream(self._exchange, keep_alive_s, events)
        await run_stream(self._exchange, stream, generation, encode=show, closing=close)

    async def _ask(self, items: list[Item], salt: str, num_bytes: int) -> GenerationRequest:
        request, info = self._request, self._placer.info
        max_tokens = request.max_output_tokens
        whole = history_of(self._turn) + items
        prompt = await prompt_of(request, self._placer, whole, num_bytes, room=max_tokens or 1)
        length = len(prompt.token_ids)
        check_context(info.max_context_tokens, length, max_tokens, param="input", noun="input")
        if max_tokens is None:
            max_tokens = info.max_context_tokens - length
        logprobs = (request.top_logprobs or 0) if self._wants_logprobs else None
        return GenerationRequest(
            [prompt],
            sampling_of(
                request, info, max_tokens=max_tokens, logprobs=logprobs, grammar=self._grammar
            ),
            skip_special_tokens=request.skip_special_tokens is not False,
            salt=salt,
            grammar_param=self._grammar_param,
        )

    def _take(self, update: Update | None) -> Cut | None:
        """Note what an update brings; None when there is nothing to show of it."""
        if update is None or isinstance(update, PromptFilled):
            return None
        assert isinstance(update, ChoiceDelta)
        if update.finish_reason is not None:
            self._finish_reason = update.finish_reason
        logprobs: list[dict[str, Any]] = []
        if self._wants_logprobs:
            logprobs = chat_logprobs(self._placer.tokenizer, update.tokens)["content"]
        if not update.text and not logprobs:
            return None
        self._texts.append(update.text)
        self._logprobs += logprobs
        self._cuts.append(Cut(len(update.text), len(logprobs)))
        return self._cuts[-1]

    def _begun(self, generation_request: GenerationRequest) -> dict[str, Any]:
        """The answer in progress."""
        request, conversation = self._request, self._history.conversation
        reasoning = request.reasoning or {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": float(int(time.time())),
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "conversation": None if conversation is None else {"id": conversation.id},
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": generation_request.sampling.temperature,
            "text": {"format": format_of(request.text), "verbosity": "medium"},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p
            if request.top_p is not None
            else generation_request.sampling.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "user": request.user,
        }

    def _end(
        self, begun: dict[str, Any], items: list[Item], generation: Generation
    ) -> dict[str, Any]:
        """The whole answer, kept if it is to be."""
        text = "".join(self._texts)
        status = "incomplete" if self._finish_reason == "length" else "completed"
        message = output_message(self._item_id, status, [output_text(text, self._logprobs)])
        answer = finished(
            begun,
            status=status,
            message=message,
            usage=generation.state.usage,
            now=float(int(time.time())),
        )
        output = Item(
            self._item_id,
            "assistant",
            (Part(text),),
            "completed" if status == "completed" else "incomplete",
        )
        self._keep(answer, items, output)
        return answer

    def _keep(self, answer: dict[str, Any], items: list[Item], output: Item) -> None:
        conversation = self._history.conversation
        if conversation is not None:
            turn = self._store.extend(self._tenant, conversation, items, [output])
        else:
            turn = Turn(self._turn, items, [output])
        if self._request.store is not False:
            response = StoredResponse(self._id, encode(answer), turn, tuple(self._cuts))
            self._store.keep(self._tenant, response, time.time())


class _ResponseStream(EventStream):
    """A stream of typed events, which ends without `[DONE]`."""

    END = b""

    def __init__(self, exchange: Exchange, keep_alive_s: float, events: ResponseEvents) -> None:
        super().__init__(exchange, keep_alive_s)
        self._events = events

    def failure(self, error: GatewayError) -> bytes:
        """See `EventStream.failure`."""
        return b"".join(self._events.failure(error))
