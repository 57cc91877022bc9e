"""Prometheus metrics: definitions, counted values, gauges read at a scrape, and the text."""
