"""Transforms: grammar, functions on text, and their limits."""
