"""Placement of tasks in space and time: pure decisions, no I/O, no clock, no torch."""
