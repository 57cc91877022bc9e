"""Agents that write a program together, as MetaGPT does: figure 17 of the paper."""

from __future__ import annotations

from parrot_bench.applications.description import Application, Call, Output, Part, Passage
from parrot_bench.applications.figures import ARCHITECT, CODERS, REVIEWERS, REVIEWS, REVISERS


def coding(name: str, files: int, scale: float = 1.0, reviews: int = REVIEWS) -> Application:
    """An architect, a coder for each file, then `reviews` times a reviewer and a reviser of each.

    Agents of a round share a long prefix: the instructions and the design, then all files. Unlike
    in the recorded trace, each agent ends on its own file's tail, and the architect runs once; the
    lengths are the recorded ones, times `scale`. More than eight files repeat the lengths.
    """
    calls: list[Call] = []

    def length(tokens: int) -> int:
        return max(1, round(tokens * scale))

    def add(role: str, label: str, parts: list[Part], tokens: int, copies: str = "") -> str:
        calls.append(
            Call(
                label,
                tuple(parts),
                length(tokens),
                seed=len(calls),
                role=role,
                writes="code" if role in ("coder", "reviser") else "prose",
                copies=copies,
            )
        )
        return label

    requirements = Passage(f"requirements of {name}", length(ARCHITECT.prompt))
    parts: list[Part] = ["Design it.\n", requirements, "\n"]
    design = add("architect", "design", parts, ARCHITECT.outputs[0])
    # The instructions have the recorded lengths without the design, and without the files.
    guide = Passage("how to code", length(CODERS.prompt - ARCHITECT.outputs[0]))
    rules = Passage("how to review", length(REVIEWERS.prompt - sum(CODERS.outputs)))
    written = [
        add(
            "coder",
            f"code_{i}",
            ["You write one file.\n", guide, "\nDesign:\n", Output(design), f"\nWrite file {i}."],
            CODERS.outputs[i % 8],
        )
        for i in range(files)
    ]
    for turn in range(reviews):
        shared: list[Part] = ["You know all files.\n", rules, "\nFiles:"]
        for i, file in enumerate(written):
            shared += [f"\nFile {i}:\n", Output(file)]
        comments = [
            add(
                "reviewer",
                f"review_{turn}_{i}",
                [*shared, f"\nReview file {i}."],
                REVIEWERS.outputs[i % 8],
            )
            for i in range(files)
        ]
        written = [
            add(
                "reviser",
                f"revise_{turn}_{i}",
                [*shared, f"\nRevise file {i}.\nIts review: ", Output(comments[i])],
                REVISERS.outputs[i % 8],
                copies=written[i],
            )
            for i in range(files)
        ]
    return Application(name, "multi-agent", tuple(calls), tuple(written))
