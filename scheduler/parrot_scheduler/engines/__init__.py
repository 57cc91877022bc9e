"""Accounts of the engines of one model."""
