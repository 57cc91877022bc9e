"""The parts of transforms: grammar, functions on text, and their bounds."""
