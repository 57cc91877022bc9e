"""One call as plain values: its request, checked and prepared, and its answer in deltas."""
