"""Grammars of structured output: compilation, and masks over the vocabulary.

The one place of the engine that knows the text of tokens. `GrammarCompiler` turns a grammar into
an automaton, in a thread of its own; a `GrammarMatcher` follows one generation through it, and
writes before each token which may follow: bit i of an int32 array is token i. The automata are
those of llguidance (an Earley parser over derivatives of regular expressions, walked along a trie
of the vocabulary); here are their limits, a cache, and errors that name the place.

Knows nothing of contexts, logits or devices.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parrot_engine.engine.grammar_closing import END, Closing, KnownEnds, SingleBytes
from parrot_engine.engine.json_states import JsonState, JsonStates, StateName
from parrot_engine.exceptions import PrimitiveError, SettingsError
from parrot_engine.protocol import Grammar

#: Bytes of a grammar's text.
MAX_GRAMMAR_BYTES = 256 * 1024
#: Strings that a choice is among.
MAX_CHOICES = 4096
#: Compiled grammars that are kept, and the bytes of all their texts.
MAX_CACHED = 128
MAX_CACHED_BYTES = 4 * 1024 * 1024
#: Grammars that wait for a thread to compile them; more are refused as `overloaded`.
MAX_COMPILING = 256
#: Seconds until a generation no longer waits for its grammar.
COMPILE_TIMEOUT_S = 20.0
#: Threads that compile; the library lets go of the interpreter while it does.
_NUM_THREADS = 2

#: Bytes of masks that are kept for states that come again.
MAX_MASK_BYTES = 64 * 1024 * 1024

#: Between the parts of a JSON text: nothing or a space. Line breaks and indentation would be tokens
#: that say nothing, and that some models repeat.
WHITESPACE = " ?"
#: Kinds that have an end to be led to; other texts are as long as their author lets them be.
_CLOSED = ("json_schema", "json_object", "lark")

#: Why no token is left.
_SPEECHLESS = "grammar: no token of this model continues what it asks for"

#: The library's defaults are made for grammars that one trusts; with these a hostile one of the
#: size allowed compiles, or fails to, in less than a second.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}


class _KnownMasks:
    """Masks of states that have names, those used last."""

    def __init__(self, num_words: int) -> None:
        self._limit = max(1, MAX_MASK_BYTES // (4 * num_words))
        self._masks: OrderedDict[tuple[int, StateName], npt.NDArray[np.int32]] = OrderedDict()

    def find(self, grammar: int, name: StateName) -> npt.NDArray[np.int32] | None:
        found = self._masks.get((grammar, name))
        if found is not None:
            self._masks.move_to_end((grammar, name))
        return found

    def keep(self, grammar: int, name: StateName, mask: npt.NDArray[np.int32]) -> None:
        self._masks[grammar, name] = mask
        if len(self._masks) > self._limit:
            self._masks.popitem(last=False)


class _Vocabulary(NamedTuple):
    tokenizer: Any
    #: int32 words of a mask over it.
    num_words: int
    single_bytes: SingleBytes
    known_masks: _KnownMasks
    #: End-of-text tokens, no text themselves.
    ends: frozenset[int]


class _Named(NamedTuple):
    """The key of masks for states that recur."""

    state: JsonState
    #: Number of the grammar.
    grammar: int


class GrammarMatcher:
    """Follows one generation; implements `parrot_engine.batch.Matcher`."""

    __slots__ = (
        "_closing",
        "_consumed",
        "_ends",
        "_matcher",
        "_min_tokens",
        "_named",
        "_next",
        "_vocabulary",
        "problem",
    )

    def __init__(
        self,
        matcher: Any,
        vocabulary: _Vocabulary,
        *,
        min_tokens: int = 0,
        ends: Sequence[int] = (),
        closing: Closing | None = None,
        named: _Named | None = None,
    ) -> None:
        """Take a matcher at its beginning.

        Args:
            matcher: llguidance's, not shared.
            vocabulary: the library's.
            min_tokens: before this many tokens, `ends` are allowed only where nothing else is.
            ends: end-of-text and stop ids.
            closing: leads it to its end near `max_tokens`; None lets it be cut.
            named: of a grammar whose states have names.
        """
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._named = named
        self._min_tokens = min_tokens
        self._ends = tuple(ends)
        self._closing = closing
        #: What `closing` says has to follow.
        self._next = None if closing is None else closing.next_token(matcher, 0, self._name())
        self._consumed = 0
        self.problem: str | None = None

    @property
    def is_closing(self) -> bool:
        return self._next is not None

    def fill_mask(self, generated_token_ids: Sequence[int], mask: npt.NDArray[np.int32]) -> None:
        if self.problem is not None:
            return
        matcher = self._matcher
        for token_id in generated_token_ids[self._consumed :]:
            matcher.consume_token(token_id)
            self._consumed += 1
            if self._named is not None and token_id not in self._vocabulary.ends:
                self._named.state.extend(self._vocabulary.tokenizer.decode_bytes([token_id]))
            if self._closing is not None and not matcher.is_error():
                self._next = self._closing.next_token(matcher, self._consumed, self._name())
        words = self._allowed()
        if words is None:
            problem = _one_line(matcher.get_error())
            self.problem = (
                _SPEECHLESS if problem.startswith("NoExtension") else f"grammar: {problem}"
            )
            return
        num_words = min(len(words), len(mask))
        allowed = words[:num_words]
        if self._next is not None:
            # NOTE: of several spellings the library allows the tokenizer's own; an end has others.
            allowed = (
                self._kept(allowed) if self._next == END else self._only(self._next, num_words)
            )
        if len(generated_token_ids) < self._min_tokens:
            longer = allowed.copy()
            for token_id in self._ends:
                if token_id >> 5 < num_words:
                    longer[token_id >> 5] &= ~np.int32(_bit(token_id))
            if longer.any():
                allowed = longer
        if not allowed.any():
            self.problem = _SPEECHLESS
            return
        mask[:num_words] = allowed

    def _allowed(self) -> npt.NDArray[np.int32] | None:
        """Return the read-only mask of allowed tokens; None if the matcher has an error."""
        if self._matcher.is_error():
            return None
        name = self._name()
        if self._named is None or name is None:
            return self._compute()
        known, grammar = self._vocabulary.known_masks, self._named.grammar
        words = known.find(grammar, name)
        if words is None:
            words = self._compute()
            if words is not None:
                known.keep(grammar, name, words)
        return words

    def _name(self) -> StateName | None:
        return None if self._named is None else self._named.state.name()

    def _compute(self) -> npt.NDArray[np.int32] | None:
        words = np.zeros(self._vocabulary.num_words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return None if self._matcher.is_error() else words

    def _kept(self, allowed: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the allowed tokens that end a text; if there are none, all of `allowed`."""
        kept = np.zeros_like(allowed)
        for token_id in self._ends:
            if token_id >> 5 < len(kept):
                kept[token_id >> 5] |= np.int32(_bit(token_id))
        kept &= allowed
        return kept if kept.any() else allowed

    @staticmethod
    def _only(token_id: int, num_words: int) -> npt.NDArray[np.int32]:
        words = np.zeros(num_words, dtype=np.int32)
        words[token_id >> 5] = np.int32(_bit(token_id))
        return words


class CompiledGrammar:
    """A grammar that is ready; gives each generation a matcher of its own."""

    #: Of all in this process.
    _numbers = count()

    def __init__(
        self, template: Any, vocabulary: _Vocabulary, *, closes: bool, states: JsonStates | None
    ) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._closes = closes
        self._states = states
        self._ends = KnownEnds()
        self._number = next(self._numbers)

    def matcher(
        self, *, min_tokens: int = 0, max_tokens: int | None = None, ends: Sequence[int] = ()
    ) -> GrammarMatcher:
        """A matcher at the beginning; see `GrammarMatcher` for the arguments.

        Args:
            max_tokens: those of the generation; None never leads it to its end.
        """
        closing = None
        if self._closes and max_tokens is not None:
            closing = Closing(self._vocabulary.single_bytes, max_tokens, min_tokens, self._ends)
        named = None
        if self._states is not None:
            named = _Named(JsonState(self._states), self._number)
        return GrammarMatcher(
            self._template.deep_copy(),
            self._vocabulary,
            min_tokens=min_tokens,
            ends=ends,
            closing=closing,
            named=named,
        )


class _Cached(NamedTuple):
    future: Future[CompiledGrammar]
    num_bytes: int


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps those used last."""

    def __init__(
        self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Begin to read the vocabulary, in a thread: a large one takes seconds.

        Args:
            tokenizer_json: the tokenizers library's serialisation.
            vocab_size: width of the logits; ids beyond it are never allowed.
            eos_token_ids: what may stand where a grammar may end; at least one.

        Raises:
            SettingsError: without the llguidance package, or without `eos_token_ids`.
        """
        try:
            import llguidance
        except ImportError as error:
            raise SettingsError(
                "grammar", f"needs the llguidance package (the extra 'engine'): {error}"
            ) from error
        self._library = llguidance
        ends = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        if not ends:
            raise SettingsError("grammar", "the model names no end-of-text token")
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._vocabulary = self._threads.submit(self._read, tokenizer_json, vocab_size, ends)
        self._cache: OrderedDict[Grammar, _Cached] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        self._compiling = 0

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Compile in another thread, or find what was compiled before. Never blocks.

        The future holds a `PrimitiveError` (`invalid_request`) for a grammar that is not valid or
        uses a feature that the library does not support.

        Raises:
            PrimitiveError: the grammar is too long, or too many wait.
        """
        found = self._cache.get(grammar)
        if found is not None:
            self._cache.move_to_end(grammar)
            return found.future
        num_bytes = len(grammar.text.encode(errors="replace"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise PrimitiveError(
                "invalid_request",
                f"grammar: {num_bytes} bytes are more than the {MAX_GRAMMAR_BYTES} allowed",
            )
        with self._lock:
            if self._compiling >= MAX_COMPILING:
                raise PrimitiveError(
                    "overloaded", f"{self._compiling} grammars wait to be compiled; try later"
                )
            self._compiling += 1
        future = self._threads.submit(self._compile, grammar)
        self._cache[grammar] = _Cached(future, num_bytes)
        self._cached_bytes += num_bytes
        while len(self._cache) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.num_bytes
        return future

    def close(self) -> None:
        """Compile nothing more; a grammar in work is finished by its thread and dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, tokenizer_json: str, vocab_size: int, ends: list[int]) -> _Vocabulary:
        # NOTE: of tokens that the tokenizer has and the model has not, the last word of the mask
        # may keep bits; masks are applied up to the width of the logits only.
        try:
            num_tokens = max(vocab_size, _vocabulary_size(tokenizer_json))
            tokenizer = self._library.LLTokenizer(
                tokenizer_json, n_vocab=num_tokens, eos_token=list(ends)
            )
        except Exception as error:
            raise PrimitiveError(
                "invalid_request",
                f"grammar: this model's tokenizer cannot be used: {_one_line(str(error))}",
            ) from error
        num_words = -(-num_tokens // 32)
        return _Vocabulary(
            tokenizer, num_words, SingleBytes(tokenizer), _KnownMasks(num_words), frozenset(ends)
        )

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            vocabulary = self._vocabulary.result(COMPILE_TIMEOUT_S)
            matcher = self._library.LLMatcher(
                vocabulary.tokenizer,
                self._definition(grammar),
                log_level=0,
                limits=self._library.LLParserLimits(**_LIMITS, verbose_errors=False),
            )
            problem = matcher.get_error()
            if problem:
                raise PrimitiveError("invalid_request", _explain(grammar, problem))
            compiled = CompiledGrammar(
                matcher,
                vocabulary,
                closes=grammar.kind in _CLOSED,
                states=JsonStates.of(grammar.text) if grammar.kind == "json_schema" else None,
            )
            # Some contradictions show only with the first mask. Also warms the lexer.
            first = compiled.matcher()
            first.fill_mask((), np.zeros(vocabulary.num_words, dtype=np.int32))
            if first.problem is not None:
                raise PrimitiveError("invalid_request", first.problem)
            return compiled
        finally:
            with self._lock:
                self._compiling -= 1

    def _definition(self, grammar: Grammar) -> str:
        """The grammar in the library's own notation.

        Raises:
            PrimitiveError: it is none.
        """
        make = self._library.LLMatcher
        if grammar.kind == "regex":
            return make.grammar_from_regex(grammar.text)
        if grammar.kind == "lark":
            try:
                return self._library.grammar_from("grammar", grammar.text)
            except ValueError as error:
                raise PrimitiveError("invalid_request", _explain(grammar, str(error))) from None
        if grammar.kind == "choice":
            choices = _choices(grammar.text)
            lark = "start: " + " | ".join(json.dumps(choice) for choice in choices)
            return make.grammar_from_lark(lark)
        schema = '{"type":"object"}' if grammar.kind == "json_object" else grammar.text
        try:
            return make.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": WHITESPACE}
            )
        except (ValueError, RecursionError) as error:
            raise PrimitiveError("invalid_request", _explain(grammar, str(error))) from None


def _choices(text: str) -> list[str]:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError):
        choices = None
    if (
        not isinstance(choices, list)
        or not 0 < len(choices) <= MAX_CHOICES
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise PrimitiveError(
            "invalid_request",
            f"grammar: a choice is an array of 1 to {MAX_CHOICES} strings, none of them empty",
        )
    return choices


def _explain(grammar: Grammar, problem: str) -> str:
    """The library's message; with the place in the schema of a keyword that it does not know."""
    message = f"grammar ({grammar.kind}): {_one_line(problem)}"
    if grammar.kind != "json_schema" or not problem.startswith("Unimplemented keys: "):
        return message
    try:
        keys = json.loads(problem.removeprefix("Unimplemented keys: "))
        place = _find_key(json.loads(grammar.text), frozenset(keys), "#")
    except (ValueError, TypeError, RecursionError):
        return message
    return message if place is None else f"{message} at {place}"


def _find_key(value: Any, keys: frozenset[str], path: str) -> str | None:
    """The JSON pointer of the first object that has all of these keys."""
    if isinstance(value, dict):
        if keys <= value.keys():
            return path
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return None
    for key, item in items:
        escaped = str(key).replace("~", "~0").replace("/", "~1")
        found = _find_key(item, keys, f"{path}/{escaped}")
        if found is not None:
            return found
    return None


def _one_line(text: str) -> str:
    """A message of the library, on one line and of a length to be shown."""
    return " ".join(text.split())[:500]


def _vocabulary_size(tokenizer_json: str) -> int:
    from tokenizers import Tokenizer

    size: int = Tokenizer.from_str(tokenizer_json).get_vocab_size(with_added_tokens=True)
    return size


def _bit(token_id: int) -> int:
    """The bit of a token within its word, as int32."""
    bit = 1 << (token_id & 31)
    return bit - (1 << 32) if bit >> 31 else bit
