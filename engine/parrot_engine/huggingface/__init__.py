"""The huggingface engine: any causal language model that transformers can load."""

from parrot_engine.huggingface.engine import HuggingFaceEngine
from parrot_engine.settings import HuggingFaceSettings

__all__ = ["HuggingFaceEngine", "HuggingFaceSettings"]
