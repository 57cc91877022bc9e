"""Kernels that draw tokens from logits, and find the largest logit."""
