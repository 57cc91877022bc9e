"""Infers edges and sessions of calls that do not declare them, from their texts alone."""
