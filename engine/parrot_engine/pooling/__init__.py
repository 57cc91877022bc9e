"""Vectors of texts and scores of pairs: what a checkpoint computes, and the engine that does it."""
