"""The live page at `/ui`: its files, and the route that serves them."""
