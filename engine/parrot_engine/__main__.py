"""`python -m parrot_engine`: see `parrot_engine.worker`."""

from __future__ import annotations

import sys

from parrot_engine.worker import main

sys.exit(main())
