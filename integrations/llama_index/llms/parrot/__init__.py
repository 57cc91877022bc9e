"""LlamaIndex on Parrot Gateway."""
