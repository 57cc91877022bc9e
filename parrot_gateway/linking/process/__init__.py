"""The linking process: its messages, its answers, and how it is started."""
