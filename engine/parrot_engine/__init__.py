"""Engines, which execute Fill and Generate.

`LLM` and `SamplingParams` are the public way to use an engine without any server; `LLM` is imported
on first use, so that the light modules (`protocol`, `link.wire`, `kv_cache.block_hash`, `text`)
stay light. Imports point down this list:

    server llm         programs: a process on a link or on HTTP, a model in this process
    loading            from options to a loaded engine
    link huggingface   the WebSocket to a gateway; the other engine
    pooling            the engine of vectors and scores
    engine             the step loop of the builtin engine
    distributed        leader and workers of a tensor-parallel engine
    kv_cache           blocks, prefix hashes, host tier
    runner             tensors, CUDA graphs, sampling
    models attention kernels
    text link.wire protocol
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parrot_engine.protocol import SamplingParams

if TYPE_CHECKING:
    from parrot_engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from parrot_engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
