"""Multi-agent coding (Parrot, OSDI '24, figure 17): architect, coders, reviewers, revisers.

Lengths are those of the recorded trace of eight files: an architect (182 tokens in, 706 out), a
coder for each file, then four times a reviewer and a reviser for each file, all agents of a round
in parallel: ten rounds. More than eight branches repeat the files. Agents of a round share a long
prefix: the instructions and the design, then all files.

Unlike the recorded trace, each agent ends on its own file's tail, and the architect is asked once.
"""

from __future__ import annotations

from parrot_gateway.bench.apps import book
from parrot_gateway.bench.apps.workload import Call, Job, Output, Prompt, Size, Workload

ARCHITECT_PROMPT, ARCHITECT_TOKENS = 182, 706
#: The coders' prompt without the design.
CODER_PROMPT = 2991 - ARCHITECT_TOKENS
CODER_TOKENS = (506, 822, 229, 447, 417, 196, 279, 444)
#: The reviewers' and revisers' prompts without the files (and without the review).
REVIEWER_PROMPT = 3717 - sum(CODER_TOKENS)
REVIEWER_TOKENS = (308, 331, 324, 278, 261, 238, 410, 394)
REVISER_TOKENS = (511, 636, 254, 404, 424, 191, 172, 448)
REVIEWS = 4


def build(size: Size, salt: str) -> Workload:
    """The workload with `size.count` files; prompts begin with `salt`."""
    branches = range(size.count)
    calls: list[Call] = []

    def ask(name: str, prompt: Prompt, tokens: int) -> str:
        calls.append(Call(name, prompt, size.tokens(tokens), seed=len(calls)))
        return name

    requirements = book.passage(size.characters(ARCHITECT_PROMPT))
    design = ask("design", (f"{salt}\nDesign it.\n{requirements}\n",), ARCHITECT_TOKENS)
    guide = book.passage(size.characters(CODER_PROMPT), start=4000)
    files = [
        ask(
            f"code_{i}",
            (f"{salt}\n{guide}\nDesign:\n", Output(design), f"\nWrite file {i}."),
            CODER_TOKENS[i % 8],
        )
        for i in branches
    ]
    rules = book.passage(size.characters(REVIEWER_PROMPT), start=16_000)
    for turn in range(REVIEWS):
        shared: list[str | Output] = [f"{salt}\n{rules}\nFiles:"]
        for i in branches:
            shared += [f"\nFile {i}:\n", Output(files[i])]
        reviews = [
            ask(f"review_{turn}_{i}", (*shared, f"\nReview file {i}."), REVIEWER_TOKENS[i % 8])
            for i in branches
        ]
        files = [
            ask(
                f"revise_{turn}_{i}",
                (*shared, f"\nRevise file {i}.\nIts review: ", Output(reviews[i])),
                REVISER_TOKENS[i % 8],
            )
            for i in branches
        ]
    job = Job("multi-agent", "multi-agent", tuple(calls), tuple(files))
    return Workload("multi-agent", (job,), ("parallel",))
