"""Families of decoders and encoders: a small file each; `registry` is the table."""
