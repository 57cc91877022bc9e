"""LlamaIndex on Parrot Gateway: the model `Parrot`, with calls linked into graphs by themselves.

Needs llama-index-core and `openai`, both checked here; imports no other package of this project.
"""

from llama_index.llms.parrot._versions import check_versions

check_versions()

from llama_index.llms.parrot.base import Parrot  # noqa: E402

__all__ = ["Parrot"]
