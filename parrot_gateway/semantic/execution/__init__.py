"""Runs the calls of sessions, each as soon as its last input is ready."""
