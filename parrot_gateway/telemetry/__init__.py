"""Records of calls, and the metrics, logs and traces made from them."""
