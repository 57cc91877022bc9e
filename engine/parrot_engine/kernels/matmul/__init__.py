"""Products of few rows: two-byte, quantised and low-rank weights, with their tables of sizes."""
