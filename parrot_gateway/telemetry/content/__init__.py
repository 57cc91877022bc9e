"""Prompts and answers of calls, for spans and the live page."""
