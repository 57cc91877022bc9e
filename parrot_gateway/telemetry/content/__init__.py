"""Prompts and answers of calls, for those who asked for them: spans and the live page."""
