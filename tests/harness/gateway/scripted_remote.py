"""A scripted engine in the gateway's own process, under the test's control step by step.

It sits behind a real `RemoteEngine` and the real wire format (see `serving`); contexts, forks,
stop ids and limits are real, only the tokens come from a function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from parrot_engine.protocol import (
    EngineInfo,
    Event,
    Failed,
    Fill,
    Filled,
    FinishReason,
    FreeContext,
    Generate,
    Generated,
    Primitive,
    SamplingParams,
    TokenLogprobs,
)
from parrot_engine.text import TextAssets, Tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

#: What follows a prompt, token by token. A `Failed` in it fails the call there.
Script = Callable[[list[int], SamplingParams], Sequence[int | Failed]]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if not loop.last or add_generation_prompt or not continue_final_message %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WORDS = ["the", " the", " quick", " fox", " jumps", " over", "Hello", " world", "ST", "OP"]


def byte_tokenizer() -> Tokenizer:
    """Every byte a token, some words besides, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        text = word.replace(" ", "Ġ")
        for end in range(2, len(text) + 1):
            if text[:end] not in vocab:
                vocab[text[:end]] = len(vocab)
                merges.append((text[: end - 1], text[end - 1]))
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return Tokenizer(
        TextAssets(
            tokenizer_json=backend.to_str(),
            chat_template=TEMPLATE,
            special_tokens={"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"},
        )
    )


@dataclass(slots=True)
class _Run:
    context_id: int
    sampling: SamplingParams
    #: None until the prompt is filled.
    script: list[int | Failed] | None = None
    #: Tokens so far, those on another engine included.
    position: int = 0


class ScriptedRemoteEngine:
    """Takes primitives and gives events, as an engine process does.

    `automatic` steps by itself while there is work; otherwise a test calls `step`.
    """

    def __init__(
        self,
        script: Script | str = "Hello world",
        *,
        automatic: bool = True,
        max_context_tokens: int = 512,
        tokens_per_step: int = 1,
        cached_tokens: int = 0,
        supports_grammars: bool = False,
    ) -> None:
        self.tokenizer = byte_tokenizer()
        self.parses_reasoning = True
        self.im_end = self.tokenizer.token_id("<|im_end|>") or 0
        self.info = EngineInfo(
            model="m",
            kind="scripted",
            architecture="Scripted",
            device="cpu",
            dtype="float32",
            max_context_tokens=max_context_tokens,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=[self.im_end],
            max_batch_size=1024,
            supports_grammars=supports_grammars,
        )
        if isinstance(script, str):
            fixed = [*self.tokenizer.encode(script), self.im_end]
            self.script: Script = lambda prompt, sampling: fixed
        else:
            self.script = script
        self.automatic = automatic
        self.tokens_per_step = tokens_per_step
        self.cached_tokens = cached_tokens
        #: Live contexts and their tokens.
        self.contexts: dict[int, list[int]] = {}
        #: The most there have been at once.
        self.most_contexts = 0
        #: Everything ever submitted.
        self.submitted: list[Primitive] = []
        self.changed = asyncio.Event()
        #: Takes the events of a step.
        self.deliver: Callable[[list[Event]], None] = lambda events: None
        self._fills: list[tuple[Fill, list[int]]] = []
        self._runs: dict[int, _Run] = {}
        self._scheduled = False

    def text(self, text: str, *, end: bool = True) -> list[int]:
        """Token ids for a script."""
        return [*self.tokenizer.encode(text), *([self.im_end] if end else [])]

    def submit(self, primitives: Sequence[Primitive]) -> None:
        """Take primitives; nothing happens before the next step."""
        for primitive in primitives:
            self.submitted.append(primitive)
            if isinstance(primitive, Fill):
                parent = primitive.parent_context_id
                source = primitive.context_id if parent is None else parent
                known = self.contexts.get(source, [])
                self.contexts[primitive.context_id] = [*known, *primitive.token_ids]
                self._fills.append((primitive, primitive.token_ids))
            elif isinstance(primitive, Generate):
                parent = primitive.parent_context_id
                if parent is not None:
                    self.contexts[primitive.context_id] = list(self.contexts[parent])
                self._runs[primitive.context_id] = _Run(
                    primitive.context_id, primitive.sampling, position=primitive.generated
                )
            else:
                self._free(primitive)
            self.most_contexts = max(self.most_contexts, len(self.contexts))
        self._notify()

    def step(self) -> None:
        """Fill what waits, else give every running context its next tokens."""
        if self._fills:
            fills, self._fills = self._fills, []
            self.deliver([self._filled(fill) for fill, _ in fills])
        else:
            self.deliver([self._advance(run) for run in list(self._runs.values())])
        self._notify()

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Until something is true of this engine; it is asked after every change."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def settle(self) -> None:
        """Until what the gateway freed is free here too."""
        await self.wait_for(lambda: not self.contexts)

    def _notify(self) -> None:
        self.changed.set()
        if self.automatic and not self._scheduled and (self._fills or self._runs):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._automatic_step)

    def _automatic_step(self) -> None:
        self._scheduled = False
        if self._fills or self._runs:
            self.step()

    def _free(self, primitive: FreeContext) -> None:
        self.contexts.pop(primitive.context_id, None)
        self._runs.pop(primitive.context_id, None)
        self._fills = [item for item in self._fills if item[0].context_id != primitive.context_id]

    def _filled(self, fill: Fill) -> Event:
        logprobs: list[TokenLogprobs | None] | None = None
        if fill.prompt_logprobs is not None:
            logprobs = [
                None,
                *(self._logprobs(i, fill.prompt_logprobs) for i in fill.token_ids[1:]),
            ]
        cached = min(self.cached_tokens, len(fill.token_ids))
        return Filled(fill.context_id, len(fill.token_ids), cached, logprobs)

    def _logprobs(self, token_id: int, top: int) -> TokenLogprobs:
        others = [((token_id + k) % 256 if k else token_id, -0.5 - k) for k in range(top)]
        return TokenLogprobs(token_id, -0.5, others)

    def _advance(self, run: _Run) -> Event:
        context = self.contexts[run.context_id]
        if run.script is None:
            prompt = context[: len(context) - run.position]
            run.script = list(self.script(prompt, run.sampling))
        ids: list[int] = []
        reason: FinishReason | None = None
        ends = {*run.sampling.stop_token_ids}
        if not run.sampling.ignore_eos:
            ends |= {*self.info.eos_token_ids}
        while reason is None and len(ids) < self.tokens_per_step:
            item = run.script[run.position] if run.position < len(run.script) else self.im_end
            if isinstance(item, Failed):
                del self._runs[run.context_id]
                return Failed(run.context_id, item.code, item.message)
            run.position += 1
            ids.append(item)
            if item in ends:
                reason = "stop"
            elif run.position >= run.sampling.max_tokens:
                reason = "length"
        context += ids
        logprobs = None
        if run.sampling.logprobs is not None:
            logprobs = [self._logprobs(i, run.sampling.logprobs) for i in ids]
        if reason is not None:
            del self._runs[run.context_id]
        return Generated(run.context_id, ids, logprobs, reason)


#: Longer than a block of the engines here, so that it has a prefix.
SYSTEM = "You answer in one word, and never in two. " * 4


def small_engine(max_batch: int = 8, *, automatic: bool = True) -> ScriptedRemoteEngine:
    """An engine with pages, whose batch has few places."""
    engine = ScriptedRemoteEngine(automatic=automatic)
    engine.info = replace(
        engine.info, max_batch_size=max_batch, num_blocks=256, block_size=16, reports_blocks=True
    )
    return engine


def fills(engine: ScriptedRemoteEngine) -> int:
    """Calls that it got."""
    return sum(isinstance(item, Fill) for item in engine.submitted)


def storyteller() -> ScriptedRemoteEngine:
    """An engine that writes words for ever; which ones, prompt and seed decide."""
    engine = ScriptedRemoteEngine()
    words = [engine.tokenizer.token_id(word.replace(" ", "Ġ")) for word in WORDS]

    def script(prompt: list[int], sampling: SamplingParams) -> list[int]:
        choose = Random(f"{prompt} {sampling.seed if sampling.temperature else 0}")
        return [choose.choice(words) or 0 for _ in range(sampling.max_tokens)]

    engine.script = script
    return engine
