"""Tools that a model may call: definitions, grammars, and calls read from text."""
