"""The step loop of the builtin engine: contexts, the plan of a step, speculation, grammars."""
