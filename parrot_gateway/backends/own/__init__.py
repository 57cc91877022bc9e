"""Engines that join over the link: one call on one of them, their processes, their models."""
