"""OpenAI's routes for models of own engines: bodies in, checks, shapes and streams out."""
