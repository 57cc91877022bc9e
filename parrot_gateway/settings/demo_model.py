"""The model that comes with the engine; apart from the settings, which take long to import."""

from __future__ import annotations

from typing import Final

#: Name of the model that is served when nothing else is asked for.
DEMO_MODEL: Final = "parrot-demo"
