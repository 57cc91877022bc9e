"""Benchmarks that a user can run: `parrot-gateway bench …`."""
