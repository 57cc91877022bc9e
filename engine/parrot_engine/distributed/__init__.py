"""Tensor parallelism: the leader and the worker processes of one engine."""
