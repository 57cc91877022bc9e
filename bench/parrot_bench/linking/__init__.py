"""Measures how well a linker rebuilds applications' graphs from calls without headers.

`script` describes calls with the truth about them; `applications` and `adversarial` make workloads
of them, `schedule` interleaves their sessions on one clock, `score` compares a linker's edges with
the truth, `calibration` its forecasts, `cost` measures time and memory, `command` shows.
"""
