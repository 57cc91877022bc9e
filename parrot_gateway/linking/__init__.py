"""Infers edges between calls, and sessions, from texts alone."""
