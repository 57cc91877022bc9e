"""One typed model of all settings, and the sources of their values."""

from typing import Final

#: Name of the default model; defined here because the settings' model is slow to import.
DEMO_MODEL: Final = "parrot-demo"
