"""How the demo model in ``parrot_engine/assets/demo`` was made; run through ``train_demo.py``.

Not part of the wheel and imported by nothing in it.
"""
