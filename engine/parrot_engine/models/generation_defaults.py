"""Defaults of a checkpoint for ending and sampling: `generation_config.json`.

Only the keys that `SamplingParams` knows. Does not decide anything per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: Used by transformers only where the checkpoint asks for sampling.
_SAMPLED_KEYS = ("temperature", "top_p", "top_k", "min_p")


class GenerationDefaults(NamedTuple):
    """End-of-text ids and sampling defaults of a checkpoint."""

    #: Ids that end the text, in the order of the files.
    eos_token_ids: list[int]
    #: Keys of `SamplingParams`.
    sampling: dict[str, float]


def read_generation_defaults(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None
) -> GenerationDefaults:
    """Defaults from both files; the generation config wins, as in transformers' `generate`.

    Temperature, top-p, top-k and min-p are taken when `do_sample` is true: without it
    transformers decodes greedily and ignores them.
    """
    generation = generation_config or {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    if eos is None:
        eos_token_ids = []
    elif isinstance(eos, int):
        eos_token_ids = [eos]
    else:
        eos_token_ids = list(dict.fromkeys(int(token_id) for token_id in eos))
    keys = list(_SAMPLED_KEYS) if generation.get("do_sample") else []
    keys.append("repetition_penalty")
    sampling = {key: generation[key] for key in keys if generation.get(key) is not None}
    return GenerationDefaults(eos_token_ids, sampling)
