"""The part of a request for one of several upstream servers that the scheduler is told.

The tokenizer of such a model is not here: four bytes of JSON count as a token, and prompts are
compared in blocks of 512 bytes, from the beginning of what chat templates put first. Which of a
server's blocks hold these is not known; prompts that begin alike have equal blocks all the same.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

BYTES_PER_TOKEN = 4
#: Tokens of a block, as estimated.
BLOCK_TOKENS = 128
_BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN
#: Blocks of one prompt that are compared; what follows, images above all, does not count.
_MAX_BLOCKS = 2048
#: Output tokens that are counted with where a request names no limit, or a larger one, until more
#: is known of its kind.
_DEFAULT_TOKENS = 1024
_MOST_TOKENS = 4096
_MOST_SEQUENCES = 128
#: Routes that generate; any other answers without decode steps.
_GENERATES = re.compile(r"/v1/(?:chat/completions|completions|responses|messages)")

#: What shows that a conversation goes on.
_ANSWERED = re.compile(rb'"role"\s*:\s*"(?:assistant|tool)"')

_ABSENT = msgspec.Raw()


class _Body(msgspec.Struct):
    model: Any = None
    tools: msgspec.Raw = _ABSENT
    functions: msgspec.Raw = _ABSENT
    system: msgspec.Raw = _ABSENT
    instructions: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    stream: Any = None
    store: Any = None
    previous_response_id: Any = None
    conversation: Any = None


_decoder = msgspec.json.Decoder(_Body)


class UpstreamPrompt(NamedTuple):
    """Sizes are in tokens, as estimated."""

    tokens: int = 1
    #: Hashes of its full blocks, each standing for all bytes up to its end.
    prefix: tuple[int, ...] = ()
    max_tokens: int = 1
    sequences: int = 1
    is_stream: bool = False
    #: Whether the caller has asked for the answer to be kept, if he says so.
    store: bool | None = None
    #: Whether it goes on from what a server keeps.
    continues: bool = False
    #: Whether it has earlier answers among its messages.
    is_answered: bool = False


def read_prompt(path: str, body: bytes, salt: str) -> UpstreamPrompt:
    """Read a request. What is no JSON object, or not in the usual shape, has no known prompt.

    Call it in a thread for a large body.

    Args:
        path: of the route.
        body: as the upstream gets it.
        salt: prompts of different salts have no block in common.
    """
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return UpstreamPrompt()
    first = (fields.tools, fields.functions, fields.system, fields.instructions)
    # Without the end of the list, so that longer conversations begin with it.
    last = b"".join((fields.messages, fields.prompt, fields.input)).rstrip(b"] \r\n\t")
    text = b"".join((*first, last))[: _MAX_BLOCKS * _BLOCK_BYTES]
    limits = (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens)
    limit = next((each for each in limits if isinstance(each, int) and each > 0), _DEFAULT_TOKENS)
    generates = _GENERATES.fullmatch(path) is not None
    sequences = fields.n if isinstance(fields.n, int) else 1
    return UpstreamPrompt(
        tokens=max(1, len(text) // BYTES_PER_TOKEN),
        prefix=_block_hashes(text, hash((salt, str(fields.model)))),
        max_tokens=min(limit, _MOST_TOKENS) if generates else 1,
        sequences=max(1, min(sequences, _MOST_SEQUENCES)),
        is_stream=fields.stream is True,
        store=fields.store if isinstance(fields.store, bool) else None,
        continues=fields.previous_response_id is not None or fields.conversation is not None,
        is_answered=_ANSWERED.search(text) is not None,
    )


def _block_hashes(text: bytes, seed: int) -> tuple[int, ...]:
    hashes, last = [], seed
    for end in range(_BLOCK_BYTES, len(text) + 1, _BLOCK_BYTES):
        last = hash((last, text[end - _BLOCK_BYTES : end]))
        hashes.append(last)
    return tuple(hashes)
