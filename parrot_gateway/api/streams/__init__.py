"""Streams that are resumed: answers kept for clients that lose their connection."""
