"""The applications of the paper, run with and without semantic variables.

`applications` only describes calls;
`runner` runs any of them in any way, `measure` compares, `command` shows.
"""
