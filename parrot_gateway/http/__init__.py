"""HTTP on raw ASGI: exchanges, authentication, admission and timeouts. Knows no API."""
