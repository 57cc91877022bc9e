"""`/v1/responses` and `/v1/conversations` for models of own engines."""
