"""Attention over a paged KV cache, and writes of new keys and values into it."""
