"""The WebSocket between an engine and a gateway: messages and the engine's end."""
