"""Makes what the tests of the gateway share importable, whichever tests run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "gateway"))
