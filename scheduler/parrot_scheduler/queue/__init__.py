"""Tasks of one model on their way to an engine: held, queued, blocked, placed."""
