"""How well a linker rebuilds applications' graphs from calls without headers.

`script` describes calls with the truth about them; `applications`, `recordings` and `adversarial`
make workloads of them, `schedule` interleaves their sessions on one clock, `score` compares what a
linker says with the truth, `naive` is a linker to compare with, `cost` measures time and memory,
`command` shows.
"""
