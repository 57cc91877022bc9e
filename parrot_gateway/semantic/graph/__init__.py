"""The graph of a session, and the objectives and task groups deduced from it."""
