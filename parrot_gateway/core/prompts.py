"""Prompts to tokens, without holding up the event loop.

Every text is tokenized whole. Long ones go to a thread: the tokenizer releases the GIL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from parrot_engine.protocol import EngineInfo
from parrot_engine.text import Tokenizer

from parrot_gateway.core.request import Prompt

#: Characters that are tokenized in place: about a millisecond.
INLINE_CHARACTERS = 8192


async def tokenize(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of each text, in order.

    A cancelled wait leaves the thread to finish its text; nothing reads the result.
    """

    def encode_all() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    if sum(map(len, texts)) <= INLINE_CHARACTERS:
        return encode_all()
    return await asyncio.to_thread(encode_all)


def start_token(tokenizer: Tokenizer, info: EngineInfo) -> int | None:
    """What an empty prompt stands for: the beginning-of-text token, else an end-of-text one."""
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    return info.eos_token_ids[0] if info.eos_token_ids else None


async def prompts_of_texts(
    tokenizer: Tokenizer, info: EngineInfo, texts: Sequence[str], *, add_special_tokens: bool
) -> list[Prompt]:
    """Texts as prompts; one without tokens becomes `start_token`, or stays empty without one."""
    tokenized = await tokenize(tokenizer, texts, add_special_tokens=add_special_tokens)
    start = start_token(tokenizer, info)
    return [
        Prompt(ids or ([] if start is None else [start]), text)
        for ids, text in zip(tokenized, texts, strict=True)
    ]
