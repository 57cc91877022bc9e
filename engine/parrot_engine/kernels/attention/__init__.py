"""Attention over a paged KV cache, and the writing of new keys and values into it."""
