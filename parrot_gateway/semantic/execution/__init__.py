"""Runs the calls of sessions, each when its last input is ready."""
