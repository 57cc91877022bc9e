"""Parrot's own API, as clients of the original V3 speak it."""
