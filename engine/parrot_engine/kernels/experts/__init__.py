"""Products with experts' weights: routing, tiles of pairs, packed weights."""
