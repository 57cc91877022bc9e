"""Steps on a device: tensors, CUDA graphs, sampling."""
