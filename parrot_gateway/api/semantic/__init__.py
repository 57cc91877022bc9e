"""Semantic variables over HTTP: fields, deferred and attended calls, variables, sessions."""
