"""The applications of the paper, run with and without semantic variables.

A module per workload (`chain`, `map_reduce`, `multi_agent`, `chat`) that only describes calls;
`runner` runs any of them in any way, `measure` compares, `tables` shows.
"""
