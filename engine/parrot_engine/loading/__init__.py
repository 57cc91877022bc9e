"""Turns options into a loaded engine: model folders and engine kinds."""
