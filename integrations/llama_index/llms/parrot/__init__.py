"""LlamaIndex on Parrot Gateway: the model `Parrot`, whose calls are linked into graphs."""

from parrot_client.versions import check_versions

#: The ranges of the extra `llama-index` in pyproject.toml.
_RANGES = {"llama-index-core": ">=0.14.20,<0.15", "openai": ">=2.45,<4"}
check_versions("llama_index.llms.parrot", "llama-index", _RANGES)

from llama_index.llms.parrot.base import Parrot  # noqa: E402

__all__ = ["Parrot"]
