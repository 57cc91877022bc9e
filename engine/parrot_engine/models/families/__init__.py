"""Families of decoders: a small file each, and the table of all."""
