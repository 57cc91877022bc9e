"""Placement of tasks in space and time: pure decisions without I/O, clock or torch."""
