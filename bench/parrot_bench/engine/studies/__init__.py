"""Studies of the engine's parts on a device, each beside the device's own limits."""
