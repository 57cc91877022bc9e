"""What a running gateway says of itself: records of calls, metrics, logs, traces."""
