"""Decoder families, each a small file over shared blocks, and the checkpoint loader."""
