"""Products of experts' weights: routing, tiles of pairs, packed weights."""
