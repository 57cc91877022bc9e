"""Tests on an NVIDIA GPU: torch, triton, transformers and pytest are all they need.

No fixtures of the gateway's tests; run them alone with `--confcutdir=tests/gpu` where only the
engine is installed. Helpers are those of the engine's tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "engine"), str(TESTS)]
