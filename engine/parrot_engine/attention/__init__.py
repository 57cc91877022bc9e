"""Attention over paged KV: one interface, one module a back end."""
