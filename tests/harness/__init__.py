"""Parts for tests against real processes. Standard library only: two environments share it."""
