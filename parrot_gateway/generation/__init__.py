"""One call on one engine: from a request to the text of its candidates. No HTTP."""
