"""The scheduler on a virtual clock, with simulated engines and clients."""
