"""From a call to what the scheduler needs to know of it."""

from __future__ import annotations

import asyncio

from parrot_engine.kv_cache.block_hash import prompt_hashes
from parrot_engine.protocol import EngineInfo
from parrot_scheduler.task import Task

from parrot_gateway.generation.placement import CallMetadata
from parrot_gateway.generation.request import GenerationRequest

#: Tokens whose hashes are made in place, in about a millisecond.
_INLINE_TOKENS = 8192
#: What an engine without pages is taken to hold, in contexts of full length.
_UNPAGED_CONTEXTS = 16
#: Blocks that say which template a prompt was made from, where nothing else does.
_TEMPLATE_BLOCKS = 4


async def prefix_of(request: GenerationRequest, info: EngineInfo) -> tuple[int, ...]:
    """Hashes of the blocks of a call's first prompt, under which engines know them."""
    if not info.block_size:
        return ()
    tokens = request.prompts[0].token_ids
    if len(tokens) <= _INLINE_TOKENS:
        return prompt_hashes(tokens, info.block_size, request.salt)
    return await asyncio.to_thread(prompt_hashes, tokens, info.block_size, request.salt)


def task_of(
    task_id: int,
    request: GenerationRequest,
    metadata: CallMetadata,
    *,
    info: EngineInfo,
    prefix: tuple[int, ...],
    bound_to: str | None = None,
    prefers: str | None = None,
) -> Task:
    """The task of a call on engines that are as `info` says.

    A call of many prompts runs them in portions, and the engine mixes them with others': it counts
    for no more than half of an engine.
    """
    lengths = [len(prompt.token_ids) for prompt in request.prompts]
    prompt_tokens, sequences = sum(lengths), len(lengths) * request.best_of
    if len(lengths) > 1:
        each = prompt_tokens / sequences + request.sampling.max_tokens
        fitting = int(capacity_tokens(info) / 2 / each)
        at_once = max(1, min(sequences, info.max_batch_size // 2, fitting))
        prompt_tokens = max(*lengths, prompt_tokens * at_once // sequences)
        sequences = at_once
    template = metadata.template
    if not template and prefix:
        template = f"{prefix[min(_TEMPLATE_BLOCKS, len(prefix)) - 1]:016x}"
    return Task(
        id=task_id,
        model=info.model,
        tenant=metadata.tenant,
        application=metadata.application or f"call-{task_id}",
        prompt_tokens=prompt_tokens,
        # 0 would say that nobody waits for it.
        max_tokens=max(1, request.sampling.max_tokens),
        prefix=prefix,
        template=template,
        objective=metadata.objective,
        groups=metadata.groups,
        # The API's priority is larger for earlier, as OpenAI's peers have it.
        priority=-metadata.priority,
        successors=metadata.successors,
        num_sequences=sequences,
        bound_to=bound_to,
        prefers=prefers,
    )


def capacity_tokens(info: EngineInfo) -> int:
    """Tokens of KV that fit on an engine, 0 where unknown."""
    paged = info.num_blocks * info.block_size
    return paged or _UNPAGED_CONTEXTS * info.max_context_tokens
