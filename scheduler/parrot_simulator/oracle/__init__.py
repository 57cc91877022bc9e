"""Offline scheduling with everything known: schedules, lower bounds, and searches for the best."""
