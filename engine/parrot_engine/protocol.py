"""The primitives that an engine executes and the events it answers with.

Plain frozen dataclasses: nothing here imports more than the standard library, so that the
gateway, the engine process and an offline program can share them. `parrot_engine.link.wire` puts
them on a WebSocket; `Engine` is what every engine implements.

A *context* is a sequence of tokens and its KV on one engine, named by an integer that the caller
chooses. Contexts form a tree: naming a parent forks it at its present end. The primitives of one
context run in the order of submission; a fork happens after everything that was submitted to the
parent before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

PROTOCOL_VERSION = 6

FinishReason: TypeAlias = Literal["stop", "length"]
#: How a Generate ends. `closed` is a `stop` to which its grammar led it near `max_tokens`.
GenerateEnd: TypeAlias = FinishReason | Literal["closed"]

#: Why a primitive failed; the gateway maps each to a status and a code of the API.
FailureCode: TypeAlias = Literal[
    "context_too_long",  # more tokens than the model or the whole KV cache can hold
    "unknown_context",  # a parent or a context that does not exist (or was freed)
    "invalid_request",  # a parameter that this engine cannot honour
    "numerical_error",  # NaN or inf in this sequence's logits
    "overloaded",  # a bounded queue of the engine is full
    "unknown_adapter",  # an adapter that is not loaded (any more)
    "engine_error",  # anything else; the engine's log has the details
    "engine_lost",  # the engine broke down, and everything on it is gone
]


#: How a grammar is written: a JSON schema; any JSON object (no text); a regular expression for the
#: whole output; a JSON array of strings, one of which is the output; a grammar in Lark's or GBNF's
#: notation.
GrammarKind: TypeAlias = Literal["json_schema", "json_object", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the text of a Generate."""

    kind: GrammarKind
    text: str = ""


#: What becomes of the KV of a context that is freed and can be found again: it goes after others
#: (`keep`), as any (`normal`), or before them (`drop`) when room is needed.
Retention: TypeAlias = Literal["keep", "normal", "drop"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one Generate: how tokens are drawn, and when it ends.

    The defaults are those of a plain sampled continuation. `stop` holds strings: an engine works
    on token ids and ignores it; it is applied where text is made (the gateway, `LLM`, the engine's
    own HTTP server).
    """

    #: Tokens to generate at most; 0 ends at once with reason `length`.
    max_tokens: int = 16
    #: 0 is greedy.
    temperature: float = 1.0
    #: Nucleus; 1 is off.
    top_p: float = 1.0
    #: Keep the k most likely tokens; 0 is off.
    top_k: int = 0
    #: Drop tokens less likely than `min_p` times the likeliest; 0 is off.
    min_p: float = 0.0
    #: OpenAI's additive penalties, over the generated tokens of this Generate.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    #: Multiplicative penalty (CTRL, arXiv 1909.05858) over prompt and generated tokens; 1 is off.
    repetition_penalty: float = 1.0
    #: Added to the logits of single token ids.
    logit_bias: dict[int, float] | None = None
    #: Same seed, prompt and parameters give the same tokens, whatever else is in the batch.
    seed: int | None = None
    #: Ids that end the generation, besides the model's own end-of-text ids.
    stop_token_ids: tuple[int, ...] = ()
    #: Go on past the model's end-of-text ids.
    ignore_eos: bool = False
    #: End-of-text and stop ids cannot be drawn before this many tokens.
    min_tokens: int = 0
    #: Number of likeliest alternatives to report per token; None reports nothing, 0 only the
    #: chosen token's log-probability. Log-probabilities are those of the raw logits
    #: (temperature 1, no penalties, no truncation).
    logprobs: int | None = None
    #: Strings that end the text; not part of it.
    stop: tuple[str, ...] = ()
    #: Only tokens that continue this grammar are drawn; end of text only where it may end.
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Fill:
    """Append `token_ids` to a context, creating it if need be, and compute their KV."""

    context_id: int
    token_ids: list[int]
    #: With a context that does not exist yet: fork this one. Otherwise it must be None.
    parent_context_id: int | None = None
    #: Blocks are found again only under the same salt (one per tenant, unless sharing is on).
    salt: str = ""
    #: Report the log-probability of each filled token, with this many alternatives each.
    prompt_logprobs: int | None = None
    #: Smaller runs earlier, and so does whatever it has to wait for.
    priority: int = 0
    #: Keep this context's KV as long as there is anything else to evict.
    pin: bool = False
    #: Id of the adapter that the context is computed with; of a context that exists, or a parent,
    #: that one, or empty.
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Generate:
    """Extend a context by sampled tokens; they become part of the context."""

    context_id: int
    sampling: SamplingParams
    #: With a context that does not exist yet: fork this one. Otherwise it must be None.
    parent_context_id: int | None = None
    priority: int = 0
    #: The last tokens of the context that this generation has generated already, on another engine.
    #: It goes on from there: they count for `max_tokens` and `min_tokens`, penalties, the random
    #: stream and the grammar, and are not reported again. At least one token stands before them.
    generated: int = 0


@dataclass(frozen=True, slots=True)
class FreeContext:
    """Forget a context; whatever still runs on it is cancelled. Its forks live on.

    A fork that was submitted before still happens where it stands: up to there the context goes
    on, and reports its events. Freeing an unknown context does nothing: a free may cross a failure
    on the wire. Only where it was freed with `keep` before does `drop` give up what was kept of it.
    """

    context_id: int
    #: A hint: engines without a cache of their own ignore it.
    retention: Retention = "normal"


@dataclass(frozen=True, slots=True)
class Pool:
    """Compute one vector, or one score, of a sequence of tokens; nothing of it is kept.

    The context is not there any more once it is `Pooled`.
    """

    context_id: int
    token_ids: list[int]
    #: Index of the first token of the second text of a pair; None: there is one text.
    second_from: int | None = None
    #: Leading components of the vector that are wanted; None: all.
    dimensions: int | None = None
    priority: int = 0


Primitive: TypeAlias = Fill | Generate | FreeContext | Pool


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token and of the likeliest tokens at its position."""

    token_id: int
    logprob: float
    #: (token id, log-probability), likeliest first.
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Filled:
    """A Fill is done: all of its tokens have KV."""

    context_id: int
    #: Tokens of this Fill.
    num_tokens: int
    #: How many of them were found in the prefix cache instead of computed.
    cached_tokens: int
    #: One entry a token of this Fill, if requested; None for a context's first token.
    prompt_logprobs: list[TokenLogprobs | None] | None = None


# NOTE: not frozen, alone among events. One is made for every token, and setting the fields of a
# frozen one takes four times as long.
@dataclass(slots=True)
class Generated:
    """New tokens of a running Generate.

    With `finish_reason` "stop" or "closed" the last id is the end-of-text or stop id: it counts as
    generated but is not part of the text. With `"length"` every id is text.
    """

    context_id: int
    token_ids: list[int]
    #: One entry a token, if requested.
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: GenerateEnd | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The context's primitives were given up; the context is freed.

    Forks that wait for it fail as well. Primitives on the id that were under way are answered with
    the same failure; free the id before using it again.
    """

    context_id: int
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result of a Pool; its context is gone."""

    context_id: int
    #: Tokens of the Pool.
    num_tokens: int
    #: The vector, or the one score: float32, little-endian.
    values: bytes


Event: TypeAlias = Filled | Generated | Failed | Pooled


@dataclass(frozen=True, slots=True)
class PoolingInfo:
    """The result of an engine's `Pool`, and how texts become one."""

    #: A vector of one text, or the score of a pair.
    task: Literal["embed", "score"]
    #: Components of a vector; 1 for scores.
    dimensions: int
    #: Longest sequence.
    max_tokens: int
    #: Whether leading components are a vector of their own (Matryoshka, arXiv 2205.13147) …
    is_matryoshka: bool = False
    #: … and how many of them, where only some numbers will do.
    matryoshka_dimensions: list[int] = field(default_factory=list)
    #: What is put before a text, by name, and the name of what is taken by default.
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    #: Texts are put in lower case first.
    lowercase: bool = False
    #: Of scores: variables with which the model's chat template writes a pair, as messages of the
    #: roles `query` and `document`, behind one of `system` where there is an instruction; None:
    #: pairs are not written by it.
    pair_template: dict[str, str | int | float | bool] | None = None
    #: For trying things out only: nobody has trained the vectors to mean anything.
    is_toy: bool = False


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A LoRA adapter that an engine has loaded."""

    #: The model name that chooses it.
    name: str
    #: Hash of its weights; what `Fill.adapter` and the prefix cache know it by.
    id: str
    #: The folder that it was read from.
    path: str
    rank: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Identity and limits of an engine; constant for its lifetime."""

    #: The name under which the model is served, e.g. `Qwen/Qwen3-0.6B`.
    model: str
    #: `builtin`, `huggingface`, …
    kind: str
    #: The checkpoint's architecture, e.g. `LlamaForCausalLM`.
    architecture: str
    device: str
    dtype: str
    #: Longest context in tokens: the smaller of the model's limit and the cache's capacity.
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: list[int]
    #: KV cache: blocks of `block_size` tokens. 0 when the engine does not page its KV.
    num_blocks: int = 0
    block_size: int = 0
    #: Sequences per step, tokens per step.
    max_batch_size: int = 1
    max_batch_tokens: int = 0
    #: Whether it reports which blocks it caches (`BlockReporting`).
    reports_blocks: bool = False
    #: Sampling defaults of the checkpoint's generation_config (temperature, top_p, …, and
    #: `max_new_tokens` of a chat).
    default_sampling: dict[str, float] = field(default_factory=dict)
    #: Whether it keeps outputs to a grammar (`SamplingParams.grammar`).
    supports_grammars: bool = False
    #: Blocks that its host tier holds beside them.
    host_blocks: int = 0
    #: Whether it takes Fill and Generate.
    generates: bool = True
    #: Seeds generations that give no seed of their own; None: nothing does.
    seed: int | None = None
    #: What it makes of a Pool; None: it takes none.
    pooling: PoolingInfo | None = None
    #: Adapters of one step; 0 where it takes none.
    max_loras: int = 0
    #: Memory on its devices: of the weights, and of the whole KV cache; 0 where it is not known.
    weight_bytes: int = 0
    kv_cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters of an engine; counters only grow."""

    running: int = 0
    waiting: int = 0
    contexts: int = 0
    free_blocks: int = 0
    #: Free blocks that still hold a prefix which can be found again.
    cached_blocks: int = 0
    steps: int = 0
    filled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    #: Tokens that were drafted ahead, and those of them that turned out right.
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    #: Blocks with a copy in the host tier, and blocks copied there and back so far.
    host_blocks: int = 0
    blocks_to_host: int = 0
    blocks_from_host: int = 0
    #: Seconds spent in steps, counted by its driver.
    busy_s: float = 0.0
    #: Tokens of contexts that attention did not read again in a step, as calls that share them had
    #: them read once; of each such call and step.
    read_once_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class BlockChanges(NamedTuple):
    """Blocks by `parrot_engine.kv_cache.block_hash.short_hash`; none is in both lists.

    A block can be found as long as it is on the device or in the engine's host tier.
    """

    #: Can be found from now on.
    stored: list[int]
    #: Cannot be found any more.
    evicted: list[int]


class StepResult(NamedTuple):
    events: list[Event]
    #: Whether a further step would do anything without new primitives.
    has_work: bool


@runtime_checkable
class Engine(Protocol):
    """Executes primitives with one model. Synchronous, driven by one thread.

    `submit` never raises for a bad primitive and never blocks: the failure comes back as an event
    of a later step.
    """

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, primitives: Sequence[Primitive]) -> None:
        """Queue primitives, in order."""
        ...

    def step(self) -> StepResult:
        """Run one batch; returns at once with no events when there is nothing to do."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Give back memory and threads; the engine is unusable afterwards."""
        ...


@runtime_checkable
class LossReporting(Protocol):
    """An engine that may break down between steps."""

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Call this, from any thread, when it has: the next step raises."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """An engine that can work ahead while it has no step to run."""

    def prepare(self) -> bool:
        """Do one short piece of it; return True while more is left."""
        ...


@runtime_checkable
class BlockReporting(Protocol):
    """An engine that reports which blocks it caches."""

    def take_block_changes(self, *, everything: bool = False) -> BlockChanges:
        """The changes since the last call; with `everything` all that it holds."""
        ...


@runtime_checkable
class AdapterLoading(Protocol):
    """An engine that can serve LoRA adapters beside its model."""

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that new contexts may name."""
        ...

    def read_adapter(self, name: str, path: str) -> Any:
        """Read the files of an adapter for `add_adapter`; slow, and safe from any thread.

        Raises:
            AdapterError: it cannot be served.
        """
        ...

    def add_adapter(self, adapter: Any) -> None:
        """Serve an adapter; one that has its name serves no new contexts any more."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Serve no new contexts with an adapter; those there are go on. May name none."""
        ...


@runtime_checkable
class PrefixSharing(Protocol):
    """An engine whose attention may read what rows share once for all of them."""

    def share_prefixes(self, enabled: bool) -> bool:
        """Return True if it does so from the next step on, as it does at the beginning.

        For measuring: the outputs are the same within rounding. Returns whether it has the choice.
        """
        ...
