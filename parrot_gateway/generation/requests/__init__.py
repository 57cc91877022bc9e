"""Typed requests: their fields, checks and prompts, and what they ask of an engine. No HTTP."""
