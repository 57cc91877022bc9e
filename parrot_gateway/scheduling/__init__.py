"""Runs the scheduler in the event loop: clock, events, actions, placement of calls."""
