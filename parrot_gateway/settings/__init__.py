"""One typed model of all that can be set, and where its values come from."""

from typing import Final

#: Name of the model that is served when none is given; here because the model of the settings
#: takes long to import.
DEMO_MODEL: Final = "parrot-demo"
