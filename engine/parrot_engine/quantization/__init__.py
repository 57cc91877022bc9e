"""Formats of quantised checkpoints, each a small file, and what their weights become."""
