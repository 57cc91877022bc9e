"""Simulated clients: applications that arrive, their calls, the network between."""
