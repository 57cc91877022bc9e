"""The graph of a session and what is deduced from it: objectives and task groups."""
