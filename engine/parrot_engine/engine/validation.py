"""Validation of the parameters of Fill and Generate; each refusal names the parameter.

Contexts are not checked here: whether one exists or is too long is found when it is settled.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from parrot_engine.exceptions import PrimitiveError
from parrot_engine.protocol import Fill, Generate, SamplingParams

#: Seeds are 64 bits, signed or not.
_SEEDS = range(-(2**63), 2**64)
#: Sampling parameters and the values that they may have. Written so that NaN fails.
_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (("max_tokens", "min_tokens", "top_k"), lambda value: value >= 0, "0 or more"),
    (
        ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        math.isfinite,
        "finite",
    ),
    (("temperature",), lambda value: value >= 0, "0 or more"),
    (("repetition_penalty",), lambda value: value > 0, "more than 0"),
    (("top_p",), lambda value: 0 < value <= 1, "more than 0, at most 1"),
    (("min_p",), lambda value: 0 <= value <= 1, "from 0 to 1"),
)


def check_fill(fill: Fill, vocab_size: int) -> None:
    """Refuse a Fill that cannot be executed.

    Raises:
        PrimitiveError: `invalid_request`.
    """
    for index, token_id in enumerate(fill.token_ids):
        if not 0 <= token_id < vocab_size:
            raise _refusal(f"token_ids[{index}]", token_id, f"from 0 to {vocab_size - 1}")
    if fill.prompt_logprobs is not None and not 0 <= fill.prompt_logprobs <= vocab_size:
        raise _refusal("prompt_logprobs", fill.prompt_logprobs, f"from 0 to {vocab_size}")


def check_generate(generate: Generate, vocab_size: int) -> None:
    """Refuse a Generate whose parameters are out of range or not finite.

    Raises:
        PrimitiveError: `invalid_request`.
    """
    if generate.generated < 0:
        raise _refusal("generated", generate.generated, "0 or more")
    params: SamplingParams = generate.sampling
    for names, is_allowed, allowed in _RANGES:
        for name in names:
            if not is_allowed(getattr(params, name)):
                raise _refusal(name, getattr(params, name), allowed)
    if params.logprobs is not None and not 0 <= params.logprobs <= vocab_size:
        raise _refusal("logprobs", params.logprobs, f"from 0 to {vocab_size}")
    if params.seed is not None and params.seed not in _SEEDS:
        raise _refusal("seed", params.seed, "a number of 64 bits")
    for token_id, bias in (params.logit_bias or {}).items():
        if not 0 <= token_id < vocab_size:
            raise _refusal("logit_bias", token_id, f"token ids from 0 to {vocab_size - 1}")
        if math.isnan(bias) or bias == math.inf:
            raise _refusal(f"logit_bias[{token_id}]", bias, "a number, or -inf to ban the token")
    if params.grammar is not None and params.ignore_eos:
        raise _refusal("ignore_eos", True, "with a grammar the output ends where that ends")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise _refusal("stop_token_ids", token_id, f"token ids from 0 to {vocab_size - 1}")


def _refusal(parameter: str, value: object, allowed: str) -> PrimitiveError:
    return PrimitiveError("invalid_request", f"{parameter}: {value} is not allowed ({allowed})")
