"""Runs steps on a device: tensors, CUDA graphs, sampling."""
