"""The running gateway: its parts, put together in one place, and their lifetime."""
