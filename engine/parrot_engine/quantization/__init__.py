"""Formats of quantised checkpoints, one small file each, and the common form of their weights."""
