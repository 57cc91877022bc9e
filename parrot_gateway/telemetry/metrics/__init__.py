"""Prometheus metrics: definitions, what is counted, what is read at a scrape, the text of both."""
