"""The running gateway: composition of its parts, and their lifetime."""
