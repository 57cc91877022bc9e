"""Applications described once: a live client, a script for linking and a plan for the simulator.

`description` holds the types; `summaries`, `coding` and `conversations` make the applications. They
are rendered by `parrot_bench.apps.workload` (live, with texts), `parrot_bench.linking.applications`
(scripts with the truth about edges) and `parrot_bench.simulator.workloads.graph` (plans of tokens).
"""
