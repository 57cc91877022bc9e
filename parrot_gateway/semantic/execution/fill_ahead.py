"""Fills the known prefix of a waiting call's prompt into an engine's prefix cache.

The prefix is filled on a context that is freed at once; its blocks stay in the cache. When the call
runs, the whole prompt is tokenized anew, so this may save work but never changes a token
(docs/decisions/018).

Each model fills one prefix at a time, in portions, at the lowest priority, and only while no prompt
waits on the engine. A CPU engine must be idle; on an accelerator, running generations leave spare
arithmetic.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from parrot_engine.protocol import EngineInfo, Failed, Fill, Filled

from parrot_gateway.backends.own.remote import EngineChannel, RemoteEngine
from parrot_gateway.calls.metadata import salt_of
from parrot_gateway.calls.requests.chat import render_chat
from parrot_gateway.calls.requests.prepared import prompts_of_texts
from parrot_gateway.calls.requests.types import ChatBody
from parrot_gateway.exceptions import GatewayError, OverloadedError
from parrot_gateway.semantic.execution.job import Job

logger = logging.getLogger(__name__)

#: Tokens filled before the engine is checked for other work.
PORTION_TOKENS = 128
#: Lower than all priorities of calls.
LOWEST_PRIORITY = 2**31 - 1
#: Tokens at a prefix's end that may change with the text that follows.
UNSURE_TOKENS = 4
#: Maximum waiting calls of a model; others are not filled ahead.
MAX_CANDIDATES = 1024
#: Share of an engine's cache that waiting calls' prefixes may occupy.
CACHE_SHARE = 0.25
#: An engine must be idle for this long, because it is also idle between two calls of a chain.
QUIET_S = 0.01
#: Lower bound for ordinary text.
CHARACTERS_PER_TOKEN = 3
#: Longest wait for one portion.
PORTION_TIMEOUT_S = 60.0


#: Returns the engine where a model's next call will probably run, or None.
ChooseEngine = Callable[[str], RemoteEngine | None]


class FillAheadStatistics(NamedTuple):
    """Gauges, zero when no call waits; then counters since the start."""

    #: Calls under consideration, and prefixes being filled.
    candidates: int
    filling: int
    #: Tokens filled for calls that still wait.
    held_tokens: int
    #: Completely filled prefixes, their tokens, and how many of these were cached before.
    fills: int
    filled_tokens: int
    cached_tokens: int
    #: Fills cut off because the call began or ended, or its engine could not continue.
    cut_off: int


class _Held(NamedTuple):
    """The filled prefix of a call that still waits."""

    engine_id: str
    tokens: int


@dataclass(eq=False)
class FillAhead:
    """Fills prefixes of waiting calls. Used in the event loop's thread only."""

    #: Minimum tokens of a prefix, and of its growth since the last fill; 0 turns everything off.
    min_tokens: int
    #: Chooses the engine to fill on.
    choose: ChooseEngine

    def __post_init__(self) -> None:
        #: By model, the calls under consideration.
        self._candidates: dict[str, dict[str, Job]] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}
        #: By call, the task that fills its prefix, and the part filled.
        self._filling: dict[str, asyncio.Task[None]] = {}
        self._held: dict[str, _Held] = {}
        self._fills = self._filled_tokens = self._cached_tokens = self._cut_off = 0

    def consider(self, job: Job) -> None:
        """Consider a call that waits for inputs, or for fewer than before."""
        if not self.min_tokens or job.is_transform or job.context is not None:
            # NOTE: a named context's contents were cached when its last call ended.
            return
        model = job.call.model
        engine = self.choose(model)
        if engine is None or not _caches(engine.info):
            return
        waiting = self._candidates.setdefault(model, {})
        if len(waiting) >= MAX_CANDIDATES:
            return
        waiting[job.id] = job
        if model not in self._workers:
            worker = asyncio.get_running_loop().create_task(
                self._work(model), name=f"fill-ahead-{model}"
            )
            self._workers[model] = worker

    def stop(self, job: Job) -> None:
        """Stop for a call that runs or has ended. Safe to call twice."""
        if not job.is_transform:
            self._candidates.get(job.call.model, {}).pop(job.id, None)
        self._held.pop(job.id, None)
        task = self._filling.get(job.id)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """End all fills; return when nothing runs any more."""
        tasks = [*self._workers.values(), *self._filling.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def statistics(self) -> FillAheadStatistics:
        return FillAheadStatistics(
            candidates=sum(map(len, self._candidates.values())),
            filling=len(self._filling),
            held_tokens=sum(held.tokens for held in self._held.values()),
            fills=self._fills,
            filled_tokens=self._filled_tokens,
            cached_tokens=self._cached_tokens,
            cut_off=self._cut_off,
        )

    async def _work(self, model: str) -> None:
        """Fill for one call after another while there are candidates."""
        candidates = self._candidates[model]
        try:
            while candidates:
                engine = self.choose(model)
                if engine is None or not _caches(engine.info):
                    return
                idle = _must_be_idle(engine.info)
                await engine.wait_idle(idle=idle)
                await asyncio.sleep(QUIET_S)
                if not engine.is_idle(idle=idle):
                    continue
                if not candidates:
                    return
                job = candidates.pop(next(iter(candidates)))
                task = asyncio.get_running_loop().create_task(self._fill_for(job, engine))
                self._filling[job.id] = task
                try:
                    await asyncio.wait({task})
                finally:
                    task.cancel()
                    del self._filling[job.id]
        except OverloadedError:
            # The engine was lost or leaves; calls are considered again when they change.
            return
        finally:
            del self._workers[model]
            del self._candidates[model]

    async def _fill_for(self, job: Job, engine: RemoteEngine) -> None:
        try:
            tokens = await read_prompt_prefix(job, engine, self.min_tokens)
            count = max(0, len(tokens) - UNSURE_TOKENS)
            # Only whole blocks can be found again.
            count -= count % engine.info.block_size
            before = self._held.get(job.id, _Held(engine.id, 0))
            known = before.tokens if before.engine_id == engine.id else 0
            if count - known < self.min_tokens or not self._has_room(engine, count - known):
                return
            job.preferred_engine = engine.name
            with engine.open(1, salt=salt_of(job.session.tenant)) as channel:
                cached = 0
                for start in range(0, count, PORTION_TOKENS):
                    portion = tokens[start : min(start + PORTION_TOKENS, count)]
                    await engine.wait_idle(idle=_must_be_idle(engine.info))
                    cached += (await _filled(channel, portion)).cached_tokens
                    self._held[job.id] = _Held(engine.id, max(known, start + len(portion)))
            self._fills += 1
            self._filled_tokens += count
            self._cached_tokens += cached
        except asyncio.CancelledError:
            self._cut_off += 1
            raise
        except (GatewayError, TimeoutError) as error:
            # The call itself will fail with the same error.
            self._cut_off += 1
            logger.debug("%s: not filled ahead: %s", job.id, error)
        except Exception:
            self._cut_off += 1
            logger.exception("%s: filling ahead failed", job.id)

    def _has_room(self, engine: RemoteEngine, more: int) -> bool:
        """Return true if prefixes of waiting calls stay within `CACHE_SHARE`."""
        held = sum(held.tokens for held in self._held.values() if held.engine_id == engine.id)
        capacity = engine.info.num_blocks * engine.info.block_size
        return held + more <= CACHE_SHARE * capacity


async def read_prompt_prefix(job: Job, engine: RemoteEngine, min_tokens: int) -> list[int]:
    """Return the prefix of a call's prompt as tokens; the last ones may change with the text that
    follows.

    A marker replaces each missing input, and the text before the first marker in the whole rendered
    prompt is the prefix. A prefix too short for `min_tokens` is not tokenized.

    Raises:
        GatewayError: the prompt cannot be rendered yet.
    """
    # Letters and digits only, because JSON strings do not escape them.
    marker = secrets.token_hex(16)
    request = job.known_request(marker)
    typed, least = request.typed, CHARACTERS_PER_TOKEN * min_tokens
    if isinstance(typed, ChatBody):
        if msgspec.json.encode(typed.messages).find(marker.encode()) < least:
            return []
        text = await render_chat(engine.tokenizer, typed, request.size)
        special = bool(typed.add_special_tokens)
    else:
        if not isinstance(typed.prompt, str) or typed.prompt.find(marker) < least:
            return []
        text, special = typed.prompt, typed.add_special_tokens is not False
    before, found, _ = text.partition(marker)
    if not found:
        # The template omits it.
        return []
    (prompt,) = await prompts_of_texts(
        engine.tokenizer, engine.info, [before], add_special_tokens=special
    )
    return prompt.token_ids


async def _filled(channel: EngineChannel, tokens: list[int]) -> Filled:
    channel.submit(Fill(channel.context_ids[0], tokens, priority=LOWEST_PRIORITY))
    async with asyncio.timeout(PORTION_TIMEOUT_S):
        event = await channel.next()
    if isinstance(event, Failed):
        raise OverloadedError(f"the engine gave it up: {event.message}")
    assert isinstance(event, Filled)
    return event


def _caches(info: EngineInfo) -> bool:
    """Return true if the engine has a prefix cache."""
    return info.reports_blocks and info.block_size > 0


def _must_be_idle(info: EngineInfo) -> bool:
    return info.device == "cpu"
