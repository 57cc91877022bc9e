"""Fills the known prefix of a waiting call's prompt ahead, while its inputs are still written.

A call that waits for its inputs often has a long prefix that none of them can change. It is
filled on a context of its own, which is freed at once: what counts is that the engine's prefix
cache then holds its blocks. The whole prompt is tokenized anew when the call runs, and the engine
finds what it has by the blocks' hashes: whatever is filled here can save work, and can change no
token of the call.

It never stands in anybody's way: one prefix at a time for a model, in portions, at the lowest
priority, and only while no prompt waits on the engine. An engine on a CPU has to be idle, because
there a filled token takes as long as any other; on an accelerator running generations leave the
arithmetic free that a portion takes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
from parrot_engine.protocol import EngineInfo, Failed, Fill, Filled

from parrot_gateway.exceptions import GatewayError, OverloadedError
from parrot_gateway.generation.placement import Channel, GenerationEngine, salt_of
from parrot_gateway.generation.requests.types import ChatBody
from parrot_gateway.semantic.execution.job import Job

logger = logging.getLogger(__name__)

#: Tokens that are filled before the next look at what else the engine has to do.
PORTION_TOKENS = 128
#: For the engine: behind all that calls may ask for.
LOWEST_PRIORITY = 2**31 - 1
#: The last tokens of a prefix, which may turn out differently with what follows.
UNSURE_TOKENS = 4
#: Calls of one model that wait to be looked at; further ones are not filled ahead.
MAX_CANDIDATES = 1024
#: Of an engine's cache, what prefixes of calls that still wait may take up.
CACHE_SHARE = 0.25
#: How long an engine has to be quiet first: between two calls of a chain it looks idle too.
QUIET_S = 0.01
#: Of ordinary text, at least.
CHARACTERS_PER_TOKEN = 3
#: Longest wait for one portion.
PORTION_TIMEOUT_S = 60.0


class QuietEngine(GenerationEngine, Protocol):
    """What is asked of an engine: `RemoteEngine`, or a double of it."""

    @property
    def id(self) -> str:
        """Unique in the gateway."""
        ...

    @property
    def name(self) -> str:
        """What the engine calls itself."""
        ...

    def is_idle(self, *, idle: bool) -> bool:
        """Whether no prompt waits on it; with `idle` whether nothing at all is in work."""
        ...

    async def wait_idle(self, *, idle: bool) -> None:
        """Return once no prompt waits on it; with `idle` once nothing at all is in work.

        Raises:
            EngineLostError: the engine went away.
        """
        ...


#: The engine where a model's next call will probably run; None when there is none.
ChooseEngine = Callable[[str], QuietEngine | None]


class FillAheadStatistics(NamedTuple):
    """Gauges, zero when no call waits; then counters since the start."""

    #: Calls that wait to be looked at; prefixes that are being filled.
    candidates: int
    filling: int
    #: Tokens filled for calls that still wait.
    held_tokens: int
    #: Prefixes filled to their end; tokens of all, and of these found in the cache already.
    fills: int
    filled_tokens: int
    cached_tokens: int
    #: Cut off, because the call began, ended, or its engine could not go on.
    cut_off: int


class _Held(NamedTuple):
    """What was filled for a call that still waits."""

    engine_id: str
    tokens: int


class FillAhead:
    """Watches waiting calls. Used in the event loop's thread only.

    Args:
        min_tokens: prefixes shorter than this are left alone, and so is one that has grown by
            less since it was filled; 0 turns everything off.
        choose: where to fill.
    """

    def __init__(self, min_tokens: int, choose: ChooseEngine) -> None:
        self._min_tokens = min_tokens
        self._choose = choose
        #: By model, the calls to be looked at, each once.
        self._candidates: dict[str, dict[str, Job]] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}
        #: By call, what fills its prefix now, and what was filled of it.
        self._filling: dict[str, asyncio.Task[None]] = {}
        self._held: dict[str, _Held] = {}
        self._fills = self._filled_tokens = self._cached_tokens = self._cut_off = 0

    def consider(self, job: Job) -> None:
        """A call waits, or waits on with more inputs than before; costs nearly nothing."""
        if not self._min_tokens or job.is_transform or job.context is not None:
            # NOTE: what a named context holds was in the cache when its last call ended.
            return
        model = job.call.model
        engine = self._choose(model)
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
        """The call waits no more: it runs, or has ended. Safe to call twice."""
        if not job.is_transform:
            self._candidates.get(job.call.model, {}).pop(job.id, None)
        self._held.pop(job.id, None)
        task = self._filling.get(job.id)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """End all fills; returns when nothing runs any more."""
        tasks = [*self._workers.values(), *self._filling.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def statistics(self) -> FillAheadStatistics:
        """Gauges and counters."""
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
        """Fill for one call after another, as long as there are candidates."""
        candidates = self._candidates[model]
        try:
            while candidates:
                engine = self._choose(model)
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
            # The engine was lost, or leaves; calls that wait on are looked at when they change.
            return
        finally:
            del self._workers[model]
            del self._candidates[model]

    async def _fill_for(self, job: Job, engine: QuietEngine) -> None:
        try:
            tokens = await read_prompt_prefix(job, engine, self._min_tokens)
            count = max(0, len(tokens) - UNSURE_TOKENS)
            # Only whole blocks can be found again.
            count -= count % engine.info.block_size
            before = self._held.get(job.id, _Held(engine.id, 0))
            known = before.tokens if before.engine_id == engine.id else 0
            if count - known < self._min_tokens or not self._has_room(engine, count - known):
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
            # Whatever is wrong with it, the call itself will tell its client.
            self._cut_off += 1
            logger.debug("%s: not filled ahead: %s", job.id, error)
        except Exception:
            self._cut_off += 1
            logger.exception("%s: filling ahead failed", job.id)

    def _has_room(self, engine: QuietEngine, more: int) -> bool:
        """Whether the prefixes of waiting calls leave enough of the cache to others."""
        held = sum(held.tokens for held in self._held.values() if held.engine_id == engine.id)
        capacity = engine.info.num_blocks * engine.info.block_size
        return held + more <= CACHE_SHARE * capacity


async def read_prompt_prefix(job: Job, engine: GenerationEngine, min_tokens: int) -> list[int]:
    """The prefix of a call's prompt as tokens; the last ones may change with what follows.

    A marker takes the place of each missing input, and what comes before the first marker in the
    whole rendered prompt is the prefix: whatever a chat template writes around messages is part of
    it. A prefix that looks shorter than `min_tokens` is not tokenized to find out.

    Raises:
        GatewayError: the prompt cannot be rendered so far.
    """
    # Letters and digits only: they stay what they are in the strings of JSON documents.
    marker = secrets.token_hex(16)
    request = job.known_request(marker)
    typed, least = request.typed, CHARACTERS_PER_TOKEN * min_tokens
    # Imported here because they load the tokenizer's library, which a gateway that only passes
    # calls on does not need.
    from parrot_gateway.generation.prompts import prompts_of_texts
    from parrot_gateway.generation.requests.chat import render_chat_aside

    if isinstance(typed, ChatBody):
        if msgspec.json.encode(typed.messages).find(marker.encode()) < least:
            return []
        text = await render_chat_aside(engine.tokenizer, typed, request.size)
        special = bool(typed.add_special_tokens)
    else:
        if not isinstance(typed.prompt, str) or typed.prompt.find(marker) < least:
            return []
        text, special = typed.prompt, typed.add_special_tokens is not False
    before, found, _ = text.partition(marker)
    if not found:
        # The template leaves it out.
        return []
    (prompt,) = await prompts_of_texts(
        engine.tokenizer, engine.info, [before], add_special_tokens=special
    )
    return prompt.token_ids


async def _filled(channel: Channel, tokens: list[int]) -> Filled:
    channel.submit(Fill(channel.context_ids[0], tokens, priority=LOWEST_PRIORITY))
    async with asyncio.timeout(PORTION_TIMEOUT_S):
        event = await channel.next()
    if isinstance(event, Failed):
        raise OverloadedError(f"the engine gave it up: {event.message}")
    assert isinstance(event, Filled)
    return event


def _caches(info: EngineInfo) -> bool:
    """Whether what was filled can be found again."""
    return info.reports_blocks and info.block_size > 0


def _must_be_idle(info: EngineInfo) -> bool:
    return info.device == "cpu"
