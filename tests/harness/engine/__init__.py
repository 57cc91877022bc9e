"""Test doubles and helpers of the engine's tests."""
