"""One typed model of all that can be set, and where its values come from."""
