"""The linking process: what it is told, how it answers, how it is started."""
