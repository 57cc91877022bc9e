"""Run one study: `python -m parrot_bench.engine.studies NAME …`; without a name they are listed."""

from __future__ import annotations

import sys

from parrot_bench.engine.studies.harness import main

main(sys.argv[1:])
