"""Converts arriving token ids to text, and shows nothing that a later token could change.

The returned pieces join to exactly the text of decoding everything at once. The cost per token is
constant: no text is decoded twice (except a short window, for uncommon kinds of tokenizers).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Protocol

from parrot_engine.text.pieces import TokenPieces
from parrot_engine.text.tokenizer import Tokenizer

#: Maximum tokens for which an uncommon decoder's text is held back while it ends in U+FFFD.
_OPAQUE_HOLD = 8

#: Maximum bytes of an incomplete UTF-8 character.
_UTF8_TAIL = 3


class _Stream(Protocol):
    """Takes visible tokens, returns final text."""

    def feed(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class IncrementalDetokenizer:
    """Decodes one growing sequence of tokens.

    With a prompt the text continues it: `prompt text + pushed text` is the text of `prompt + pushed
    tokens`. A character left incomplete by the prompt belongs to the pushed text.
    """

    __slots__ = ("_pieces", "_skip", "_stream")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """Start behind `prompt_token_ids`, of which only the ends are read."""
        self._pieces = tokenizer.pieces
        self._skip = skip_special_tokens
        self._stream: _Stream
        kind = self._pieces.plan.kind
        if kind == "byte_level":
            self._stream = _ByteStream(self._pieces, self._visible_backwards(prompt_token_ids))
        elif kind == "sentencepiece":
            self._stream = _SentencePieceStream(
                self._pieces,
                self._visible(prompt_token_ids),
                self._visible_backwards(prompt_token_ids),
            )
        else:
            tail: list[int] = []
            for token_id in self._visible_backwards(prompt_token_ids):
                tail.append(token_id)
                if len(tail) == _OPAQUE_HOLD:
                    break
            self._stream = _OpaqueStream(tokenizer, tail[::-1])

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became final with these tokens; may be empty."""
        if self._skip:
            special = self._pieces.is_special
            token_ids = [token_id for token_id in token_ids if not special(token_id)]
        return self._stream.feed(token_ids)

    def push_each(self, token_ids: Sequence[int]) -> list[str]:
        """Push tokens like `push`; return one string per token.

        A character of several tokens appears at the token that completes it. Running sums of the
        lengths give the `text_offset` of OpenAI's log-probabilities.
        """
        return [self.push((token_id,)) for token_id in token_ids]

    def flush(self) -> str:
        """End the sequence; return held-back text, with incomplete characters as U+FFFD."""
        return self._stream.finish()

    def _visible(self, token_ids: Sequence[int]) -> Iterator[int]:
        special = self._pieces.is_special
        return (t for t in token_ids if not (self._skip and special(t)))

    def _visible_backwards(self, token_ids: Sequence[int]) -> Iterator[int]:
        special = self._pieces.is_special
        return (t for t in reversed(token_ids) if not (self._skip and special(t)))


class _ByteStream:
    """Decodes byte-level tokens with one incremental UTF-8 decoder.

    NOTE: Python's "replace" and Rust's lossy conversion turn an invalid run into equally many
    U+FFFD (maximal subparts, Unicode chapter 3.9), so this equals the tokenizers library.
    """

    __slots__ = ("_decode", "_get")

    def __init__(self, pieces: TokenPieces, backwards: Iterator[int]) -> None:
        self._get = pieces.get
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        # UTF-8 is self-synchronising: three bytes are enough to find an incomplete character.
        tail: list[bytes] = []
        for token_id in backwards:
            tail.append(self._bytes(token_id))
            if sum(map(len, tail)) >= _UTF8_TAIL:
                break
        self._decode(b"".join(reversed(tail)))

    def _bytes(self, token_id: int) -> bytes:
        piece = self._get(token_id)
        return piece if isinstance(piece, bytes) else b""

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._decode(b"".join([self._bytes(token_id) for token_id in token_ids]))

    def finish(self) -> str:
        return self._decode(b"", True)


class _SentencePieceStream:
    """Decodes text tokens with single bytes between them.

    NOTE: a run of byte tokens is text if the *whole* run is valid UTF-8, otherwise one U+FFFD per
    byte. So a run is held until it ends.
    """

    __slots__ = ("_first", "_pieces", "_prompt_bytes", "_run", "_strip_left")

    def __init__(
        self, pieces: TokenPieces, forwards: Iterator[int], backwards: Iterator[int]
    ) -> None:
        self._pieces = pieces
        self._strip_left = pieces.plan.strip_left
        self._first = pieces.plan.bare_first is not None
        self._run = bytearray()
        #: Number of the run's bytes that belong to the prompt.
        self._prompt_bytes = 0
        # The beginning of the prompt decides what is dropped from the beginning of the text …
        settled = False
        for token_id in forwards:
            settled = self._strip_left == 0 and not self._first
            if settled:
                break
            self.feed((token_id,))
        if settled:
            # … and its end has the bytes of an open run.
            self._run.clear()
            for token_id in backwards:
                piece = pieces.get(token_id)
                if piece is None:
                    continue
                if not isinstance(piece, int):
                    break
                self._run.append(piece)
            self._run.reverse()
        self._prompt_bytes = len(self._run)

    def feed(self, token_ids: Sequence[int]) -> str:
        out: list[str] = []
        get = self._pieces.get
        for token_id in token_ids:
            piece = get(token_id)
            if piece is None:
                continue
            if self._first:
                piece = self._pieces.first_text(token_id)
                self._first = False
            if isinstance(piece, int):
                self._run.append(piece)
                continue
            if self._run:
                out.append(self._close_run())
            if isinstance(piece, str):
                out.append(piece)
        return self._stripped("".join(out))

    def finish(self) -> str:
        return self._stripped(self._close_run())

    def _close_run(self) -> str:
        run, mine = bytes(self._run), self._prompt_bytes
        self._run.clear()
        self._prompt_bytes = 0
        try:
            text = run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * (len(run) - mine)
        # The prompt's complete characters were shown with the prompt.
        return text[len(run[:mine].decode(errors="ignore")) :]

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._pieces.plan.strip):
                self._strip_left = 0
                break
            text = text[len(self._pieces.plan.strip) :]
            self._strip_left -= 1
        return text


class _OpaqueStream:
    """Any other decoder: the difference between decoding a window with and without new tokens."""

    __slots__ = ("_shown", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, tail: list[int]) -> None:
        self._tokenizer = tokenizer
        #: Context tokens for the new ones, then tokens not shown yet.
        self._window = tail
        self._shown = len(tail)

    def feed(self, token_ids: Sequence[int]) -> str:
        self._window += token_ids
        return self._difference(hold=True) if token_ids else ""

    def finish(self) -> str:
        return self._difference(hold=False)

    def _difference(self, *, hold: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._shown], skip_special_tokens=False)
        after = self._tokenizer.decode(self._window, skip_special_tokens=False)
        held = len(self._window) - self._shown
        if hold and after.endswith("\ufffd") and held < _OPAQUE_HOLD:
            return ""
        self._window = self._window[-_OPAQUE_HOLD:]
        self._shown = len(self._window)
        return after[len(before) :]
