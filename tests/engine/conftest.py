"""Triton's interpreter for all tests of the engine, where there is no GPU.

Before anything imports triton: its own functions, like ours, are what they are from the first
import on, and transformers imports it too.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
