"""Prompts to tokens, without holding up the event loop.

Every text is tokenized whole. Long ones go to a thread: the tokenizer releases the GIL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from parrot_engine.protocol import EngineInfo
from parrot_engine.text import Tokenizer

from parrot_gateway.exceptions import ContextLengthError
from parrot_gateway.generation.request import TokenizedPrompt

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


async def refuse_hopeless(
    tokenizer: Tokenizer, info: EngineInfo, texts: Sequence[str], *, param: str, noun: str
) -> None:
    """Refuse texts that can never fit the model's context, before they are tokenized.

    Args:
        tokenizer: the model's.
        info: of the engine.
        texts: the prompts.
        param: the field that holds them.
        noun: what they are called: `messages` or `prompt`.

    Raises:
        ContextLengthError: one of them has too many tokens, however they turn out.
    """
    # Others are cheap to tokenize, or have hardly more characters than the context has tokens.
    suspects = [
        text for text in texts if len(text) > max(info.max_context_tokens, INLINE_CHARACTERS)
    ]
    if not suspects:
        return
    least = await asyncio.to_thread(lambda: max(map(tokenizer.least_tokens, suspects)))
    if least > info.max_context_tokens:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_context_tokens} tokens. However, "
            f"your {noun} resulted in at least {least} tokens. Please reduce the length of the "
            f"{noun}.",
            param=param,
        )


async def prompts_of_texts(
    tokenizer: Tokenizer,
    info: EngineInfo,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    param: str = "prompt",
    noun: str = "prompt",
) -> list[TokenizedPrompt]:
    """Texts as prompts; one without tokens becomes `start_token`, or stays empty without one.

    Raises:
        ContextLengthError: see `refuse_hopeless`, which explains `param` and `noun`.
    """
    await refuse_hopeless(tokenizer, info, texts, param=param, noun=noun)
    tokenized = await tokenize(tokenizer, texts, add_special_tokens=add_special_tokens)
    start = start_token(tokenizer, info)
    return [
        TokenizedPrompt(ids or ([] if start is None else [start]), text)
        for ids, text in zip(tokenized, texts, strict=True)
    ]
