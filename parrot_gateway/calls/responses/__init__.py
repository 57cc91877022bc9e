"""Items and stored objects of the Responses API."""
