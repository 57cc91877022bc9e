"""Texts and request bodies as templates with places for values; references."""
