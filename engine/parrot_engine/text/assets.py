"""The tokenizer and chat templates of a model folder, as one value that can be sent.

The engine reads it from the checkpoint and sends it to the gateway, which then tokenizes without
having the files, torch or transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class TextAssetsError(ValueError):
    """A model folder whose tokenizer cannot be read; the message says which file and why."""


@dataclass(frozen=True, slots=True)
class TextAssets:
    """Tokenizer and chat templates of one model."""

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
