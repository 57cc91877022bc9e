"""The builtin engine: paged KV, continuous batching, prefix cache."""
