"""Vectors of texts and scores of pairs: which of a checkpoint's, and how they are computed."""
