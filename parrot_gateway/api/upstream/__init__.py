"""Calls that an upstream answers: bytes in, bytes out."""
