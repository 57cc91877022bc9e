"""Run Triton's kernels in its interpreter where there is no GPU, before anything imports triton."""

from __future__ import annotations

import os

import torch

# Other tests run beside these.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
