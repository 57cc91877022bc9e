"""Attention over paged KV: one interface, one module per back end."""
