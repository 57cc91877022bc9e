"""Texts and request bodies with places for values; references."""
