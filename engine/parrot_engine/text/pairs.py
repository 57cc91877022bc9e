"""A query and a document in a reranker's form: as two texts, or through its chat template.

Templates of rerankers write messages of the roles `query` and `document`, after one of `system`
with the instruction, as in sentence-transformers and vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parrot_engine.text.chat import ChatTemplate
from parrot_engine.text.tokenizer import PoolingTokens, Tokenizer

#: Stands for a document, to find the text behind it.
_MARK = "\ue000"


def write_pair(
    chat: ChatTemplate, pair: tuple[str, str], instruction: str | None, variables: Mapping[str, Any]
) -> str:
    """Return query and document as the template writes them, given its variables.

    Raises:
        ChatTemplateError: the template refuses the pair.
    """
    query, document = pair
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    if instruction is not None:
        messages.insert(0, {"role": "system", "content": instruction})
    return chat.render(messages, **{"add_generation_prompt": False, **variables})


def encode_written_pairs(
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    variables: Mapping[str, Any],
    *,
    max_tokens: int | None = None,
) -> list[PoolingTokens]:
    """Encode pairs as the chat template writes them; see `Tokenizer.encode_for_pooling`.

    If a pair is cut, the template's text behind documents stays, because the judgement comes there.

    Raises:
        ChatTemplateError: the template refuses a pair.
    """
    chat = tokenizer.chat
    sequences = tokenizer.encode_rendered(
        [write_pair(chat, pair, instruction, variables) for pair in pairs]
    )
    results = []
    for (query, _), ids in zip(pairs, sequences, strict=True):
        if max_tokens is not None and len(ids) > max_tokens:
            written = write_pair(chat, (query, _MARK), instruction, variables)
            [end] = tokenizer.encode_rendered([written.rpartition(_MARK)[2]])
            end = end[-max_tokens:]
            ids = ids[: max_tokens - len(end)] + end
        results.append(PoolingTokens(ids, None))
    return results
