"""Routes of the operator, under `/admin/v1`; `http.admin` has the key that they are behind."""
