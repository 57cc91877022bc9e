"""Products of few rows with two-byte, quantised and low-rank weights, and the choice of their
kernels.
"""
