"""Records of calls, and the metrics, logs and traces that a running gateway makes of them."""
