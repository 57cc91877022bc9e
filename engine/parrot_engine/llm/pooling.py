"""Vectors and scores of many texts from an `LLM`'s engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import partial

from parrot_engine.llm.session import Session, raise_failure
from parrot_engine.protocol import Event, Pool, Pooled, PoolingInfo
from parrot_engine.text.pairs import encode_written_pairs
from parrot_engine.text.tokenizer import PoolingTokens, Tokenizer

#: Sequences submitted at a time, in steps of full size.
_STEPS_AHEAD = 2


def prepared_text(info: PoolingInfo, text: str, prompt_name: str | None) -> str:
    """Return a text preceded by its prompt.

    Raises:
        ValueError: the model has no prompt of this name.
    """
    name = info.default_prompt if prompt_name is None else prompt_name
    if name is not None:
        if name not in info.prompts:
            raise ValueError(f"there is no prompt {name!r}, only {sorted(info.prompts)}")
        text = info.prompts[name] + text
    return text.lower() if info.lowercase else text


def encode_pairs(
    tokenizer: Tokenizer,
    info: PoolingInfo,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
) -> list[PoolingTokens]:
    """Encode pairs for a model of scores.

    Raises:
        ChatTemplateError: the model's template refuses a pair.
        ValueError: the model takes no instruction.
    """
    if info.pair_template is None:
        if instruction is not None:
            raise ValueError("the model takes no instruction")
        return tokenizer.encode_for_pooling(pairs)
    if instruction is None and info.default_prompt is not None:
        instruction = info.prompts[info.default_prompt]
    return encode_written_pairs(tokenizer, pairs, instruction, info.pair_template)


def pool(
    session: Session, sequences: Iterable[PoolingTokens], dimensions: int | None = None
) -> list[list[float]]:
    """Return the values of each sequence, in order.

    Raises:
        GenerationError: one of them failed; the others are cancelled.
    """
    results: dict[int, list[float]] = {}
    running: dict[int, int] = {}

    def handle(index: int, event: Event) -> None:
        raise_failure(event)
        if isinstance(event, Pooled):
            values = array("f")
            values.frombytes(event.values)
            results[index] = values.tolist()
            session.ignore(event.context_id)
            del running[event.context_id]

    waiting = enumerate(sequences)
    ahead = _STEPS_AHEAD * session.engine.info.max_batch_size
    try:
        upcoming = next(waiting, None)
        while upcoming is not None or running:
            while upcoming is not None and len(running) < ahead:
                index, (token_ids, second_from) = upcoming
                context_id = session.new_id()
                running[context_id] = index
                session.submit(
                    partial(handle, index), Pool(context_id, token_ids, second_from, dimensions)
                )
                upcoming = next(waiting, None)
            session.step()
    finally:
        session.free(*running)
    return [results[index] for index in range(len(results))]
