"""From options to a loaded engine: model folders and engine kinds."""
