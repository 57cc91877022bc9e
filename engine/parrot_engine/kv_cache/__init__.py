"""KV blocks: pool, prefix hashes, host tier."""
