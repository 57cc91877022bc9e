"""Sessions, semantic variables and the calls between them; independent of routes."""
