"""Measurements of the builtin engine on a device, each beside the device's own limits."""
