"""A gateway, engines and calls on a virtual clock, with faults drawn from a seed.

Everything but the engines is the real thing: registry, scheduler, placement, generation, and the
wire format of both directions. An oracle knows each answer without running any of it.
"""

from __future__ import annotations

import asyncio
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from parrot_engine.link.wire import (
    Events,
    Register,
    Submit,
    decode_from_engine,
    decode_from_gateway,
    encode,
)
from parrot_engine.protocol import EngineInfo, SamplingParams
from parrot_engine.text import OutputText, Tokenizer

from harness.gateway.hashing_engine import HashingEngine, next_token
from harness.gateway.scripted_remote import byte_tokenizer
from parrot_gateway.backends.own.generate import Generation
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.calls.generation_request import (
    ChoiceDelta,
    GenerationRequest,
    PromptFilled,
    TokenizedPrompt,
    choice_seed,
)
from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.exceptions import DeadlineError, GatewayError
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.model import LinkingSettings, Settings

MODEL = "m"
TOKENIZER: Tokenizer = byte_tokenizer()
_EOS = TOKENIZER.token_id("<|im_end|>") or 0
#: Words, the halves of a stop string, an end, and bytes that only together are a character.
VOCABULARY = (
    *TOKENIZER.encode(" the"), *TOKENIZER.encode(" quick"), *TOKENIZER.encode("ST"),
    *TOKENIZER.encode("OP"), *TOKENIZER.encode("é"), *TOKENIZER.encode("é"), _EOS, *b"ab",
)  # fmt: skip
#: After so much virtual time faults end, and an engine is there for good.
_FAULTS_END_S = 3.0
#: Nothing takes longer than this.
_END_S = 400.0


@dataclass(slots=True)
class Engine:
    """An engine of the world and its link.

    Attributes:
        stalled: it takes work and makes no steps.
    """

    remote: RemoteEngine
    engine: HashingEngine
    #: Set when there may be something to do.
    has_work: asyncio.Event = field(default_factory=asyncio.Event)
    stalled: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


@dataclass(slots=True)
class Call:
    """One call, and what its client got.

    Attributes:
        text, token_ids, finished: by prompt and candidate.
        filled: how often each prompt was reported as filled.
        end: how it ended: "done", "cancelled", or the code of its error.
    """

    request: GenerationRequest
    deadline_s: float | None = None
    leaves_after_s: float | None = None
    text: dict[tuple[int, int], str] = field(default_factory=dict)
    token_ids: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    finished: dict[tuple[int, int], str] = field(default_factory=dict)
    filled: list[int] = field(default_factory=list)
    generated: int = -1
    end: str = ""
    #: The seed that the gateway has drawn, of a call without one.
    drawn_seed: int | None = None

    def seed(self, prompt: int, choice: int) -> int | None:
        """The seed of a candidate."""
        if self.drawn_seed is None:
            return choice_seed(self.request.sampling.seed, choice)
        return choice_seed(self.drawn_seed, prompt * self.request.best_of + choice)


def draw_call(draw: Random) -> Call:
    """A call of any kind."""
    prompts = [
        TokenizedPrompt([draw.randrange(256) for _ in range(draw.randint(1, 40))])
        for _ in range(draw.choice([1, 1, 1, 2, 5]))
    ]
    n = draw.choice([1, 1, 1, 2, 4])
    sampling = SamplingParams(
        max_tokens=draw.choice([0, 1, 2, 12, 30]),
        temperature=draw.choice([0.0, 1.0]),
        seed=draw.choice([None, draw.randrange(1000)]),
        stop=draw.choice([(), ("STOP",), ("STOP", " the quick")]),
        ignore_eos=draw.random() < 0.5,
        logprobs=draw.choice([None, 0]),
    )
    return Call(
        GenerationRequest(
            prompts, sampling, n=n, best_of=n, prompt_logprobs=draw.choice([None, None, 0])
        ),
        deadline_s=draw.uniform(0.2, 5.0) if draw.random() < 0.1 else None,
        leaves_after_s=draw.uniform(0.0, 4.0) if draw.random() < 0.15 else None,
    )


class Expected:
    """The answer of one candidate, worked out without any gateway."""

    def __init__(self, call: Call, prompt: int, choice: int) -> None:
        request = call.request
        seed = call.seed(prompt, choice)
        sampling = SamplingParams(temperature=request.sampling.temperature, seed=seed)
        ids = array("I", request.prompts[prompt].token_ids)
        output = OutputText(TOKENIZER, list(ids), request.sampling.stop)
        self.token_ids: list[int] = []
        self.text, self.reason = "", ""
        for position in range(request.sampling.max_tokens):
            token_id = next_token(ids, position, sampling, VOCABULARY)
            ids.append(token_id)
            self.token_ids.append(token_id)
            is_end = token_id == _EOS and not request.sampling.ignore_eos
            is_last = position + 1 == request.sampling.max_tokens
            delta = output.push([token_id], "stop" if is_end else "length" if is_last else None)
            self.text += delta.text
            if delta.finish_reason is not None:
                self.reason = delta.finish_reason
                break


class World:
    """One run, all of it drawn from a seed.

    Args:
        seed: decides everything.
        max_faults: kills, stalls, drains and joins.
    """

    def __init__(self, seed: int, max_faults: int = 8) -> None:
        self._draw = Random(seed)
        self._gateway = Gateway(Settings(linking=LinkingSettings(enabled=False)))
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        # The one clock that the scheduler has, the same for all parts.
        self._gateway.scheduling._clock = self._loop.time
        self.engines: list[Engine] = []
        self._max_faults = max_faults
        self._numbers = iter(range(1000))
        self.calls: list[Call] = []
        #: A record of what happened, for a failing seed.
        self.story: list[str] = []
        self.kills = 0
        #: Contexts that were lost with an engine.
        self.lost_contexts = 0

    def _note(self, text: str) -> None:
        self.story.append(f"{self._now():7.3f} {text}")

    def _now(self) -> float:
        """Seconds since the beginning of this world."""
        return self._loop.time() - self._began

    # -- engines ------------------------------------------------------------------------------

    def join(self) -> Engine:
        name = f"e{next(self._numbers)}"
        info = EngineInfo(
            model=MODEL, kind="hashing", architecture="Hashing", device="cpu", dtype="float32",
            max_context_tokens=512, vocab_size=TOKENIZER.vocab_size, eos_token_ids=[_EOS],
            max_batch_size=self._draw.choice([1, 4, 64]),
        )  # fmt: skip
        remote = self._gateway.registry.add(Register(name, info, TOKENIZER.assets), TOKENIZER)
        joined = Engine(remote, HashingEngine(VOCABULARY, [_EOS], Random(self._draw.random())))
        joined.tasks = [
            asyncio.create_task(self._pump(joined)), asyncio.create_task(self._steps(joined))
        ]  # fmt: skip
        self.engines.append(joined)
        self._note(f"{name} joins")
        return joined

    def leave(self, engine: Engine, reason: str) -> None:
        """Its link ends: nothing that is under way in either direction arrives."""
        self._note(f"{engine.remote.name} {reason}")
        self.engines.remove(engine)
        for task in engine.tasks:
            task.cancel()
        self._gateway.registry.remove(engine.remote.id, reason)

    async def _pump(self, engine: Engine) -> None:
        while True:
            await engine.remote.has_outgoing.wait()
            await asyncio.sleep(self._draw.choice([0.0, 0.001, 0.02]))
            while (data := engine.remote.take_outgoing()) is not None:
                message = decode_from_gateway(data)
                assert isinstance(message, Submit)
                engine.engine.submit(message.primitives)
                engine.has_work.set()

    async def _steps(self, engine: Engine) -> None:
        pace_s = self._draw.choice([0.02, 0.05, 0.2])
        while True:
            await engine.has_work.wait()
            await asyncio.sleep(pace_s)
            if engine.stalled or not engine.engine.is_busy:
                engine.has_work.clear()
                continue
            data = encode(Events(engine.engine.step()))
            # On the way: lost if the link ends now.
            await asyncio.sleep(self._draw.choice([0.0, 0.003]))
            message = decode_from_engine(data)
            assert isinstance(message, Events)
            engine.remote.deliver(message.events)

    async def _faults(self) -> None:
        draw = self._draw
        times = sorted(
            draw.uniform(0.0, _FAULTS_END_S) for _ in range(draw.randint(0, self._max_faults))
        )
        for at in times:
            await asyncio.sleep(max(0.0, at - self._now()))
            what = draw.choice(["kill", "kill", "stall", "drain", "join", "all"])
            if what == "join" or not self.engines:
                if len(self.engines) < 4:
                    self.join()
            elif what == "all":
                for engine in list(self.engines):
                    self.kill(engine)
            else:
                engine = draw.choice(self.engines)
                if what == "kill":
                    self.kill(engine)
                elif what == "stall":
                    engine.stalled = not engine.stalled
                    engine.has_work.set()
                    self._note(f"{engine.remote.name} stalls: {engine.stalled}")
                elif any(each.remote.takes_calls for each in self.engines if each is not engine):
                    # It finishes what it has, unless it is killed first.
                    self._gateway.registry.drain(engine.remote.id)
                    self._note(f"{engine.remote.name} drains")
        await asyncio.sleep(max(0.0, _FAULTS_END_S - self._now()))
        # Heartbeats would have noticed by now.
        for engine in [each for each in self.engines if each.stalled]:
            self.kill(engine)
        self.join()

    def kill(self, engine: Engine) -> None:
        self.kills += 1
        self.lost_contexts += len(engine.engine.contexts)
        self.leave(engine, "is killed")

    # -- calls --------------------------------------------------------------------------------

    def start(
        self, call: Call, after_s: float = 0.0, *, hesitates: bool = False
    ) -> asyncio.Task[None]:
        """Let a client send a call after a while, and read it, with pauses if it hesitates."""
        self.calls.append(call)
        return asyncio.create_task(self._call(call, after_s, hesitates))

    async def _call(self, call: Call, after_s: float, hesitates: bool) -> None:
        request, deadline = call.request, None
        call.filled = [0] * len(request.prompts)
        try:
            await asyncio.sleep(after_s)
            if call.deadline_s is not None:
                deadline = self._loop.time() + call.deadline_s
            async with asyncio.timeout(_END_S):
                await self._gateway.models.loaded(MODEL)
                placer = self._gateway.models.placer(MODEL, CallMetadata())
                draw_seed = placer.draw_seed

                def draw() -> int:
                    assert call.drawn_seed is None, "a second seed"
                    call.drawn_seed = draw_seed()
                    return call.drawn_seed

                placer.draw_seed = draw  # type: ignore[method-assign]
                with Generation(placer, request, deadline) as generation:
                    while not generation.state.done:
                        until = self._loop.time() + 0.05 if hesitates else None
                        update = await generation.next(until)
                        if update is not None:
                            self._take(call, update)
                        if hesitates:
                            await asyncio.sleep(0.01)
                    call.generated = generation.state.usage.completion_tokens
            call.end = "done"
        except GatewayError as error:
            call.end = "deadline" if isinstance(error, DeadlineError) else error.code or "error"
        except TimeoutError:
            call.end = "hung"
        except asyncio.CancelledError:
            call.end = "cancelled"

    @staticmethod
    def _take(call: Call, update: PromptFilled | ChoiceDelta) -> None:
        if isinstance(update, PromptFilled):
            call.filled[update.prompt] += 1
            return
        place = (update.prompt, update.choice)
        assert place not in call.finished, "an update after the end"
        call.text[place] = call.text.get(place, "") + update.text
        call.token_ids.setdefault(place, []).extend(update.token_ids)
        if update.finish_reason is not None:
            call.finished[place] = update.finish_reason

    async def run(self) -> None:
        """Run everything to its end, and check it.

        Raises:
            AssertionError: a promise is broken.
        """
        draw = self._draw
        for _ in range(draw.randint(1, 3)):
            self.join()
        tasks = []
        for _ in range(draw.randint(1, 5)):
            call = draw_call(draw)
            self.calls.append(call)
            running = self._call(
                call, draw.choice([0.0, draw.uniform(0.0, 2.0)]), draw.random() < 0.3
            )
            task = asyncio.create_task(running)
            tasks.append(task)
            if call.leaves_after_s is not None:
                self._loop.call_later(max(0.001, call.leaves_after_s), task.cancel)
        faults = asyncio.create_task(self._faults())
        await asyncio.gather(*tasks)
        await faults
        await self.check()

    async def check(self) -> None:
        """Check all calls, which have ended, and end the world.

        Raises:
            AssertionError: a promise is broken.
        """
        for call in self.calls:
            self._check(call)
        await self._check_nothing_is_left()

    async def abandon(self) -> None:
        """End what a failed run leaves."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._gateway.scheduling.close()

    def _check(self, call: Call) -> None:
        """Compare all that was delivered with the answer, or its beginning if it ended early."""
        request = call.request
        allowed = {"done"}
        if call.leaves_after_s is not None:
            allowed.add("cancelled")
        if call.deadline_s is not None:
            allowed.add("deadline")
        # A fault that takes all engines counts once.
        if self.kills >= 4:
            allowed.add("poisoned_call")
        assert call.end in allowed, call.end
        assert max(call.filled) <= 1, "a prompt is filled twice"
        total = 0
        for prompt in range(len(request.prompts)):
            for choice in range(request.best_of if request.sampling.max_tokens else 0):
                place, expected = (prompt, choice), Expected(call, prompt, choice)
                total += len(expected.token_ids)
                text, ids = call.text.get(place, ""), call.token_ids.get(place, [])
                if call.end == "done":
                    assert text == expected.text, "another text"
                    assert ids == expected.token_ids, "other tokens"
                    assert call.finished[place] == expected.reason, "another end"
                else:
                    assert expected.text.startswith(text), "another text, cut off"
                    assert expected.token_ids[: len(ids)] == ids, "other tokens, cut off"
        if call.end == "done":
            assert call.filled == [1] * len(request.prompts), "a prompt is not filled"
            assert call.generated == total, "usage"

    async def _check_nothing_is_left(self) -> None:
        scheduling = self._gateway.scheduling
        await asyncio.sleep(5.0)
        assert scheduling.describe()["tasks"] == 0, "tasks are left"
        for engine in self.engines:
            assert engine.remote._channels == {}, "channels are left"
            load = engine.remote.running, engine.remote.queued_tokens
            assert load == (0, 0), "work is left"
            assert engine.engine.contexts == {}, "contexts are left"
        models: Any = scheduling.describe()["models"]
        for model in models.values():
            assert model["queued"] == 0, "queued tasks are left"
            assert not any(each["tasks"] for each in model["engines"]), "placed tasks are left"
        for engine in list(self.engines):
            self.leave(engine, "ends")
        await asyncio.sleep(0)
        scheduling.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            with suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, 100.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, asyncio.all_tasks()
