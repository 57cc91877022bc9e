"""Sessions, semantic variables and the calls between them. Knows no routes."""
