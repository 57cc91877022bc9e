"""The HTTP surface: parse, call one method of the core, shape the answer."""
