"""Routes of the operator: models, and adapters; `http.admin` has the key that they are behind."""
