"""Studies of the engine's parts on a device: `python tools/engine_study.py NAME [options]`.

For work on kernels, graphs or the host's share of a step; the benchmark for users is
`parrot-gateway bench engine`. Without a name the studies are listed.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "engine"), str(ROOT / "tools")]

if __name__ == "__main__":
    from engine_studies.harness import main

    main(sys.argv[1:])
