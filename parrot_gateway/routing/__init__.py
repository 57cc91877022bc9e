"""Routing chooses the backend of a call: model names, placement by the scheduler, explanations."""
