"""Kernels that sample tokens from logits, and find the largest logit."""
