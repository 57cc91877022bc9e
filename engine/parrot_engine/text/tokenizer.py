"""The model's own tokenizer, without transformers.

Token-exact with `AutoTokenizer` of the same folder. `parrot_engine.text.detokenizer` decodes
streams, and `parrot_engine.text.chat` renders chats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parrot_engine.text.chat import ChatTemplate
from parrot_engine.text.length_bound import read_bound
from parrot_engine.text.pieces import TokenPieces, read_plan

#: Characters or ids beyond which a text takes longer than a millisecond.
_LONG_TEXT = 8192


class TextAssetsError(ValueError):
    """A model folder's tokenizer cannot be read; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class TextAssets:
    """Tokenizer and chat templates of one model, as a single value that can be sent.

    The engine reads it from the checkpoint and sends it to the gateway, which then tokenizes
    without files, torch or transformers.
    """

    #: The tokenizers library's serialisation of the whole pipeline.
    tokenizer_json: str
    #: One template, several by name, or none.
    chat_template: str | dict[str, str] | None = None
    #: `bos_token`, `eos_token`, … and the model's own named tokens, for templates.
    special_tokens: dict[str, str] = field(default_factory=dict)
    #: The longest input in the tokenizer's configuration, in tokens.
    model_max_length: int | None = None
    #: True: encode the text of special tokens as ordinary text.
    split_special_tokens: bool = False


class PoolingTokens(NamedTuple):
    """A text or a pair, in the form of a model of vectors or scores."""

    token_ids: list[int]
    #: See `protocol.Pool`.
    second_from: int | None


class Tokenizer:
    """Converts text to token ids and back. Immutable after construction; safe to use from
    threads.
    """

    def __init__(self, assets: TextAssets) -> None:
        """Build the pipeline; takes up to a second for a vocabulary of 150,000.

        Raises:
            TextAssetsError: the serialised pipeline is not valid.
        """
        # Imported here, so that importing the class costs the gateway nothing.
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_str(assets.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise TextAssetsError(f"The serialised tokenizer is not valid: {error}") from error
        pipeline = json.loads(assets.tokenizer_json)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = assets.split_special_tokens
        self.assets = assets
        self.chat = ChatTemplate(assets.chat_template, assets.special_tokens)
        self.pieces = TokenPieces(backend, read_plan(pipeline))
        self._bound = read_bound(pipeline)
        self._backend = backend
        self._size = backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, added ones included; a model's logits may be wider."""
        return self._size

    @property
    def bos_token_id(self) -> int | None:
        return self.special_token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Return the id of the tokenizer's end-of-text token.

        A generation may end with other tokens too: see `EngineInfo.eos_token_ids`.
        """
        return self.special_token_id("eos_token")

    @property
    def model_max_length(self) -> int | None:
        """Return the longest input in the tokenizer's configuration."""
        return self.assets.model_max_length

    def special_token_id(self, name: str) -> int | None:
        """Return the id of a named token (`bos_token`, `pad_token`, …); None if the model has
        none.
        """
        text = self.assets.special_tokens.get(name)
        return None if text is None else self.token_id(text)

    def token_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `encode` never undercuts, without tokenizing.

        A text of 20 MB takes seconds to tokenize and milliseconds here. Returns 0 if no bound is
        known.
        """
        return 0 if self._bound is None else self._bound.least_tokens(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; special tokens written in the text count as such.

        Long texts may be encoded in a thread, because encoding them releases the GIL. Half a
        surrogate pair becomes U+FFFD.
        """
        try:
            return self._encode(text, add_special_tokens)
        except TypeError:
            return self._encode(_clean(text), add_special_tokens)

    def encode_for_pooling(
        self, texts: Sequence[tuple[str, str | None]], *, max_tokens: int | None = None
    ) -> list[PoolingTokens]:
        """Encode texts or pairs with the special tokens of the model's training.

        Several are encoded at once, on as many threads as the library has, without the GIL.

        Args:
            texts: each with a single text, or a first and second one.
            max_tokens: limit; the end of a text, or of a pair's second text, is cut to fit.
        """
        try:
            return self._encode_for_pooling(texts, max_tokens)
        except TypeError:
            clean = [(_clean(a), None if b is None else _clean(b)) for a, b in texts]
            return self._encode_for_pooling(clean, max_tokens)

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts that contain their special tokens, all at once, without the
        GIL.
        """
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:
            clean = list(map(_clean, texts))
            encodings = self._backend.encode_batch_fast(clean, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _encode_for_pooling(
        self, texts: Sequence[tuple[str, str | None]], max_tokens: int | None
    ) -> list[PoolingTokens]:
        items = [a if b is None else (a, b) for a, b in texts]
        results = []
        for (first, second), encoding in zip(
            texts, self._backend.encode_batch_fast(items), strict=True
        ):
            if max_tokens is not None and len(encoding.ids) > max_tokens:
                encoding = self._cut(first, second, len(encoding.ids) - max_tokens)
            ids, types = encoding.ids, encoding.type_ids
            # A tokenizer may have a single type for both texts.
            is_told = second is not None and 1 in types
            results.append(PoolingTokens(ids, types.index(1) if is_told else None))
        return results

    def _cut(self, first: str, second: str | None, excess: int) -> Any:
        """Encode a text or a pair, `excess` tokens shorter at its end."""
        parts = [first] if second is None else [first, second]
        cut = self._backend.encode_batch_fast(parts, add_special_tokens=False)
        cut[-1].truncate(max(0, len(cut[-1].ids) - excess))
        return self._backend.post_process(cut[0], None if second is None else cut[1])

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int]
        if len(text) <= _LONG_TEXT:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            # NOTE: `encode` holds the GIL throughout, which would stop the gateway for a second per
            # megabyte and more. The batch methods release it.
            [encoding] = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            ids = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids outside the vocabulary contribute nothing.

        Many ids may be decoded in a thread, because that releases the GIL.
        """
        known = [token_id for token_id in ids if 0 <= token_id < 2**32]
        text: str
        if len(known) <= _LONG_TEXT:
            text = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        else:
            [text] = self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token, which may end within a character."""
        piece = self.pieces.get(token_id)
        if piece is None:
            return b""
        if isinstance(piece, int):
            return bytes([piece])
        return piece if isinstance(piece, bytes) else piece.encode()

    def token_text(self, token_id: int) -> str:
        r"""Return one token in the form of OpenAI's log-probabilities: its text, or
        `bytes:\xe2\x80`.
        """
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def vocabulary_text(self, token_id: int) -> str:
        """Return one token as the vocabulary writes it, with spaces and bytes in the pipeline's
        code; empty for an unknown id.
        """
        found: str | None = self._backend.id_to_token(token_id)
        return found or ""

    def is_special(self, token_id: int) -> bool:
        """Return true if `decode` skips this token."""
        return self.pieces.is_special(token_id)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a chat; see `ChatTemplate.render`.

        The template writes its own special tokens: encode with `add_special_tokens=False`.

        Raises:
            ChatTemplateError: the template is missing, or refuses this chat.
        """
        return self.chat.render(
            messages, add_generation_prompt=add_generation_prompt, template=template, **kwargs
        )


def _clean(text: str) -> str:
    """Replace half surrogate pairs by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
