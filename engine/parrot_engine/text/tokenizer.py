"""The model's own tokenizer, without transformers.

Token-exact with `AutoTokenizer` of the same folder. Streams are decoded by
`parrot_engine.text.detokenizer`, chats rendered by `parrot_engine.text.chat`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parrot_engine.text.chat import ChatTemplate
from parrot_engine.text.length_bound import read_bound
from parrot_engine.text.pieces import TokenPieces, read_plan

#: Characters, or ids, beyond which a text takes longer than a millisecond.
_LONG_TEXT = 8192


class TextAssetsError(ValueError):
    """A model folder whose tokenizer cannot be read; the message says which file and why."""


@dataclass(frozen=True, slots=True)
class TextAssets:
    """Tokenizer and chat templates of one model, as one value that can be sent.

    The engine reads it from the checkpoint and sends it to the gateway, which tokenizes without
    having the files, torch or transformers.
    """

    #: The tokenizers library's serialisation of the whole pipeline.
    tokenizer_json: str
    #: One template, several by name, or none.
    chat_template: str | dict[str, str] | None = None
    #: `bos_token`, `eos_token`, … and the model's own named tokens, as templates see them.
    special_tokens: dict[str, str] = field(default_factory=dict)
    #: The longest input that the tokenizer's configuration names, in tokens.
    model_max_length: int | None = None
    #: Encode the text of special tokens as ordinary text.
    split_special_tokens: bool = False


class PoolingTokens(NamedTuple):
    """A text, or a pair, as a model of vectors or scores reads it."""

    token_ids: list[int]
    #: See `protocol.Pool`.
    second_from: int | None


class Tokenizer:
    """Text to token ids and back. Immutable after construction; safe to use from threads."""

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
        """Number of tokens, added ones included; a model's logits may be wider."""
        return self._size

    @property
    def bos_token_id(self) -> int | None:
        return self.special_token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's end-of-text token.

        A generation may end with others too: see `EngineInfo.eos_token_ids`.
        """
        return self.special_token_id("eos_token")

    @property
    def model_max_length(self) -> int | None:
        """The longest input that the tokenizer's configuration names."""
        return self.assets.model_max_length

    def special_token_id(self, name: str) -> int | None:
        """Id of a named token (`bos_token`, `pad_token`, …); None where the model has none."""
        text = self.assets.special_tokens.get(name)
        return None if text is None else self.token_id(text)

    def token_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `encode` never falls short of; computed without tokenizing.

        Text of 20 MB takes seconds to tokenize and milliseconds here. 0 where no bound is known.
        """
        return 0 if self._bound is None else self._bound.least_tokens(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in the text count as such.

        Long texts may be encoded in a thread: for them the GIL is released. Half a surrogate pair,
        which is no text, becomes U+FFFD.
        """
        try:
            return self._encode(text, add_special_tokens)
        except TypeError:
            clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._encode(clean, add_special_tokens)

    def encode_for_pooling(
        self, text: str, second: str | None = None, *, max_tokens: int | None = None
    ) -> PoolingTokens:
        """A text, or a pair, with the special tokens that the model was trained with.

        Args:
            text: the only text, or the first of a pair.
            second: of a pair.
            max_tokens: cut the end of the text, of a pair that of the second, to fit.
        """
        try:
            return self._encode_for_pooling(text, second, max_tokens)
        except TypeError:
            clean = [
                None
                if part is None
                else part.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                for part in (text, second)
            ]
            return self._encode_for_pooling(clean[0] or "", clean[1], max_tokens)

    def _encode_for_pooling(
        self, text: str, second: str | None, max_tokens: int | None
    ) -> PoolingTokens:
        item = text if second is None else (text, second)
        [encoding] = self._backend.encode_batch_fast([item])
        if max_tokens is not None and len(encoding.ids) > max_tokens:
            parts = [part for part in (text, second) if part is not None]
            cut = self._backend.encode_batch_fast(parts, add_special_tokens=False)
            excess = len(encoding.ids) - max_tokens
            cut[-1].truncate(max(0, len(cut[-1].ids) - excess))
            encoding = self._backend.post_process(cut[0], None if second is None else cut[1])
        types = encoding.type_ids
        return PoolingTokens(encoding.ids, types.index(1) if second and 1 in types else None)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int]
        if len(text) <= _LONG_TEXT:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            # NOTE: `encode` holds the GIL throughout, which stops the gateway for as long as the
            # text takes: a second per megabyte and more. The batch methods release it.
            [encoding] = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            ids = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary contribute nothing.

        Many ids may be decoded in a thread: for them the GIL is released.
        """
        known = [token_id for token_id in ids if 0 <= token_id < 2**32]
        text: str
        if len(known) <= _LONG_TEXT:
            text = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        else:
            [text] = self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, which need not be whole characters."""
        piece = self.pieces.get(token_id)
        if piece is None:
            return b""
        if isinstance(piece, int):
            return bytes([piece])
        return piece if isinstance(piece, bytes) else piece.encode()

    def token_text(self, token_id: int) -> str:
        r"""One token as OpenAI's log-probabilities show it: its text, or `bytes:\xe2\x80`."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def vocabulary_text(self, token_id: int) -> str:
        """One token as the vocabulary writes it, its spaces and bytes in the pipeline's own code;
        empty for an id that there is none of."""
        found: str | None = self._backend.id_to_token(token_id)
        return found or ""

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` skips this token."""
        return self.pieces.is_special(token_id)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a chat; see `ChatTemplate.render`.

        The template writes its own special tokens: encode with `add_special_tokens=False`.

        Raises:
            ChatTemplateError: no template, or one that refuses this chat.
        """
        return self.chat.render(
            messages, add_generation_prompt=add_generation_prompt, template=template, **kwargs
        )
