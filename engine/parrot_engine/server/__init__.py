"""The engine as a program: its command, and its own HTTP server."""
