"""Training of the demo model in ``parrot_engine/assets/demo``."""
