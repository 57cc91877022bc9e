"""Simulated engines: cache, steps, step times, the fleet."""
