"""Backends that answer calls: engines that the gateway runs itself, and upstream servers."""
