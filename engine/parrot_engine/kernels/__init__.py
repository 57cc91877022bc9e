"""Triton kernels of the builtin engine, and the functions that launch them.

Importing a module of this package imports triton; the package itself does not. `selection.py`
decides which back end a device gets.
"""
