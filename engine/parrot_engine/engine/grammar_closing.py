"""The end of a grammar for a generation that nears its `max_tokens`.

A model that fills a string or a list without end is cut by its token limit, and no document is
left. `Closing` finds from where a text stands a short end (close the string, give what is still
required a small value, close the brackets). Once the tokens that are left come down to those of
this end and a reserve, nothing but the end may follow.

Ends are found for JSON and for what surrounds it in tool calls. A text for which none is found, or
whose shortest leaves the model no tokens of its own, is cut as any other; so is one that may end
anywhere.

What happens depends on a generation's tokens alone: one that is replayed gets the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from parrot_engine.engine.json_states import StateName

_T = TypeVar("_T")

#: Tokens that a text may take unseen, at least: one token may be several of its characters.
_MIN_RESERVE = 8
#: Tokens of an end.
_MAX_END_TOKENS = 1024
#: Tokens between two looks for an end, and the tokens left from which on there is one for each.
_MAX_INTERVAL = 128
_NEAR_TOKENS = 24
#: Facts about a grammar's states that are kept.
_MAX_KNOWN = 8192

#: Bytes in the order in which an end tries them: those that close, that go on, small values, others
#: (a pattern's), those that open. 1 before 0: there is no year 0000.
_FIRST, _LAST = b'}]",:10n', b"[{\n"
_ORDER = (
    *_FIRST,
    *(byte for byte in range(32, 127) if byte not in _FIRST + _LAST),
    *_LAST,
    *range(128, 256),
)
#: End a run of bytes of one kind, and their kind.
_STRUCTURAL, _STRUCTURE = '}]",:[{\n', -1
#: Begin something that has an end of its own.
_OPENING = b',{["\n'

#: Bytes of one kind in a row after which an end tries another kind, and bytes of any kind after
#: which it tries those that it has not used: a pattern such as `[0-9]+D` repeats without end.
_MAX_ALIKE = 2
_MAX_RUN = 8

#: In place of a token: the text has to end.
END = -1


class SingleBytes:
    """The tokens of one byte each in a vocabulary.

    Args:
        tokenizer: llguidance's.
    """

    def __init__(self, tokenizer: Any) -> None:
        found: dict[int, int] = {}
        for byte in _ORDER:
            text = bytes([byte])
            ids = tokenizer.greedy_tokenize(chr(byte)) if byte < 128 else None
            ids = tokenizer.tokenize_bytes(text) if ids is None else ids
            if len(ids) == 1 and tokenizer.decode_bytes(ids) == text:
                found[byte] = ids[0]
        self.ordered = list(found.values())
        #: Of these tokens: digit, upper or lower case, or else the byte itself where it closes or
        #: By token: its byte's kind, see `_kind`.
        self.kinds = {token: _kind(byte) for byte, token in found.items()}
        self.opening = [found[byte] for byte in _OPENING if byte in found]
        self.quote, self.brace, self.letter = (found.get(ord(byte)) for byte in '"}x')


class KnownEnds:
    """A cache of findings about the named states of a grammar."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Any] = {}

    def find(
        self, name: StateName | None, what: str, end: Sequence[int], compute: Callable[[], _T]
    ) -> _T:
        """Return the cached result of `compute` for this state and end."""
        if name is None:
            return compute()
        key = (name, what, *end)
        if key not in self._found:
            if len(self._found) >= _MAX_KNOWN:
                self._found.clear()
            self._found[key] = compute()
        found: _T = self._found[key]
        return found


class Closing:
    """Decides when a generation is led to its end, and to which.

    Args:
        single_bytes: of the vocabulary.
        max_tokens: of the generation, the end-of-text token included.
        min_tokens: it is not led to an end of fewer tokens.
        known: of the grammar.
    """

    def __init__(
        self, single_bytes: SingleBytes, max_tokens: int, min_tokens: int, known: KnownEnds
    ) -> None:
        self._bytes = single_bytes
        self._known = known
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        #: Number of tokens at which an end is looked for again.
        self._next_look = 0
        #: Tokens of the shortest end that was found, and by how many a later one was longer.
        self._shortest: int | None = None
        self._growth = 0
        #: The end that was found last.
        self._found: list[int] | None = None
        #: Number of tokens at which the end begins, and the end without its end-of-text token.
        self._begins = 0
        self._end: Sequence[int] | None = None

    def next_token(
        self, matcher: Any, num_tokens: int, name: StateName | None = None
    ) -> int | None:
        """Return the token that has to follow, or `END`; None leaves it open.

        Args:
            matcher: llguidance's, after `num_tokens` tokens of the generation; it is not changed.
                Called for each number of tokens in turn.
            name: of its state, if that has one.
        """
        if self._end is None and num_tokens >= self._next_look:
            self._look(matcher, num_tokens, name)
        if self._end is None:
            return None
        at = num_tokens - self._begins
        return self._end[at] if at < len(self._end) else END

    def _look(self, matcher: Any, num_tokens: int, name: StateName | None) -> None:
        left = self._max_tokens - num_tokens
        end = self._found_before(matcher, left, name) or self._first_end(matcher, left, name)
        self._found = end
        self._next_look = num_tokens + _MAX_INTERVAL
        if end is None:
            return
        # The end-of-text token is one of them.
        size = len(end) + 1
        self._shortest = size if self._shortest is None else min(self._shortest, size)
        self._growth = max(self._growth, size - self._shortest)
        if num_tokens == 0 and left - size < _MIN_RESERVE:
            self._next_look = self._max_tokens
            return
        slack = self._slack(matcher, end, left, name)
        if slack < 0 and num_tokens + size >= self._min_tokens:
            self._begins, self._end = num_tokens, end
        elif slack <= _NEAR_TOKENS:
            self._next_look = num_tokens + 1
        else:
            self._next_look = num_tokens + min(_MAX_INTERVAL, slack // 2)

    def _slack(self, matcher: Any, end: Sequence[int], left: int, name: StateName | None) -> int:
        """Tokens that the text may take before it has to be led to its end; negative: none.

        Args:
            end: its tokens; none: it may end where it is. There it does only if what may follow
                is too long.
            left: up to `max_tokens`.
        """
        size = len(end) + 1
        slack = left - 1 - size
        if end:
            slack -= max(_MIN_RESERVE, self._growth)
            if slack > _NEAR_TOKENS:
                return slack
        longest = self._known.find(name, "next", end, lambda: self._longest_of_next(matcher, end))
        # What has no end that can be found has none that fits.
        growth = max(0, (left - 1 if longest is None else longest) - len(end))
        if not end and growth == 0:
            return _MAX_INTERVAL
        return min(slack, left - 1 - size - growth)

    def _longest_of_next(self, matcher: Any, end: Sequence[int]) -> int | None:
        """Tokens of the longest end of what may begin next; 0 within a text, None: one has none."""
        longest = 0
        if self._is_in_text(matcher):
            return longest
        for token in self._bytes.opening:
            # What the end itself begins with makes it no longer.
            if token not in end[:1] and matcher.validate_tokens([token]):
                further = matcher.deep_copy()
                further.consume_token(token)
                longer = self._find_end(further, _MAX_END_TOKENS)
                if longer is None:
                    return None
                longest = max(longest, len(longer))
        return longest

    def _found_before(self, matcher: Any, limit: int, name: StateName | None) -> list[int] | None:
        """The end that was found last, if a text that goes on may still end with it.

        Trying it takes a sixth of the time of looking for one.
        """
        end = self._found
        if not end or len(end) >= limit:
            return None
        return end if self._known.find(name, "holds", end, lambda: _holds(matcher, end)) else None

    def _first_end(self, matcher: Any, limit: int, name: StateName | None) -> list[int] | None:
        """Tokens to a place where the text may end; None where they would be too many."""
        if name is None:
            return self._find_end(matcher, limit)
        end = self._known.find(
            name, "end", (), lambda: self._find_end(matcher, _MAX_END_TOKENS + 1)
        )
        return None if end is None or len(end) >= limit else end

    def _find_end(self, matcher: Any, limit: int) -> list[int] | None:
        """Tokens to a place where the text may end; None where they would be too many."""
        walk = matcher.deep_copy()
        end: list[int] = []
        limit = min(limit - 1, _MAX_END_TOKENS)
        while not walk.is_accepting():
            tokens = walk.compute_ff_tokens() or self._next_of_end(walk, end)
            if not tokens or len(end) + len(tokens) > limit or not walk.consume_tokens(tokens):
                return None
            end += tokens
        return end

    def _next_of_end(self, walk: Any, end: Sequence[int]) -> Sequence[int]:
        if self._is_in_text(walk):
            for token in (self._bytes.quote, self._bytes.letter):
                if token is not None and walk.validate_tokens([token]):
                    return [token]
        for token in self._in_order(end):
            if walk.validate_tokens([token]):
                return [token]
        return ()

    def _in_order(self, end: Sequence[int]) -> Sequence[int]:
        """The single bytes in the order in which an end that stands here tries them."""
        kinds, ordered = self._bytes.kinds, self._bytes.ordered
        run: list[int] = []
        for token in reversed(end[-_MAX_ALIKE * _MAX_ALIKE * _MAX_RUN :]):
            if kinds.get(token, _STRUCTURE) == _STRUCTURE:
                break
            run.append(token)
        last = {kinds[token] for token in run[:_MAX_ALIKE]}
        if len(run) < _MAX_ALIKE or (len(last) > 1 and len(run) < _MAX_RUN):
            return ordered
        used = frozenset(run) if len(run) >= _MAX_RUN else frozenset()
        return sorted(ordered, key=lambda token: (token in used, kinds[token] in last))

    def _is_in_text(self, walk: Any) -> bool:
        """Return True if it is inside a string: only there may a bracket and a letter follow."""
        brace, letter = self._bytes.brace, self._bytes.letter
        return (
            brace is not None
            and letter is not None
            and walk.validate_tokens([brace]) == 1
            and walk.validate_tokens([letter]) == 1
        )


def _kind(byte: int) -> int:
    """Return 1 for a digit, 2 and 3 for letters of upper and lower case, 0 for other bytes."""
    character = chr(byte)
    if character in _STRUCTURAL:
        return _STRUCTURE
    if character.isdigit():
        return 1
    return 2 if character.isupper() else 3 if character.islower() else 0


def _holds(matcher: Any, end: Sequence[int]) -> bool:
    """Return True if these tokens are an end of what `matcher` follows; it is not changed."""
    if matcher.validate_tokens(end) < len(end):
        return False
    walk = matcher.deep_copy()
    return bool(walk.consume_tokens(end) and walk.is_accepting())
