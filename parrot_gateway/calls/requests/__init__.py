"""Typed requests: their fields, checks and prompts, and the requests for engines. No HTTP."""
