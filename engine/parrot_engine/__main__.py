"""`python -m parrot_engine`: see `parrot_engine.server.command`."""

from __future__ import annotations

import sys

from parrot_engine.server.command import main

sys.exit(main())
