"""Test doubles and helpers of the gateway's tests."""
