"""Configuration files of the LiteLLM proxy, read as settings of this gateway.

Pure: takes a parsed file, gives settings and a report of what has no counterpart.
"""
