"""Summaries of documents: refined part by part, of all parts at once, and as a tree."""

from __future__ import annotations

from collections.abc import Sequence

from parrot_bench.applications.description import Application, Call, Output, Part, Passage

#: As long as the paper's prompts, at 4 characters a token: 17 and 6; 37, 28 and 32; 10 and 25.
SUMMARISE = "Write a one-sentence summary of the following part of a document:\n"
CONCISE = "\nCONCISE SUMMARY OF IT:"
REFINE = (
    "Your job is to produce a final summary of a long document, which you read part by part. We "
    "have provided a summary of all the parts before this one:\n"
)
_CONTEXT = (
    "\nWe have the opportunity to refine this summary, only if needed, with one more part of the "
    "document.\n------------\n"
)
REFINED = (
    "\n------------\nGiven the new part, refine the summary. If the part is not useful, return the "
    "summary as it was.\nTHE REFINED SUMMARY:"
)
REDUCE = "Write one summary of these summaries:\n"
OF_ALL = (
    "\nKeep names and numbers, and leave out what is said more than once."
    "\nTHE SUMMARY OF ALL OF THEM:"
)


def chain(name: str, chunks: Sequence[Passage], tokens: int) -> Application:
    """Figure 11 of the paper: a summary refined chunk by chunk; the last one is read."""
    calls: list[Call] = []
    for step, chunk in enumerate(chunks):
        if calls:
            prompt: tuple[Part, ...] = (REFINE, Output(calls[-1].name), _CONTEXT, chunk, REFINED)
        else:
            prompt = (SUMMARISE, chunk, CONCISE)
        role = "refine" if step else "first"
        calls.append(Call(f"step_{step}", prompt, tokens, seed=step, role=role))
    return Application(name, "chain", tuple(calls), (calls[-1].name,))


def map_reduce(
    name: str, chunks: Sequence[Passage], tokens: int, *, objective: str = ""
) -> Application:
    """Figure 13 of the paper: chunks summarised apart, then together."""
    maps = [
        Call(
            f"map_{number}",
            (SUMMARISE, chunk, CONCISE),
            tokens,
            seed=number,
            objective=objective,
            role="map",
        )
        for number, chunk in enumerate(chunks)
    ]
    last = _joined("reduce", REDUCE, maps, tokens, objective=objective, seed=len(maps))
    return Application(name, "map-reduce", (*maps, last), (last.name,))


def tree(name: str, chunks: Sequence[Passage], tokens: int, width: int = 3) -> Application:
    """Chunks summarised, then summaries of `width` at a time, up to the root."""
    level = [
        Call(f"leaf_{number}", (SUMMARISE, chunk, CONCISE), tokens, seed=number, role="map")
        for number, chunk in enumerate(chunks)
    ]
    calls = list(level)
    while len(level) > 1:
        groups = [level[at : at + width] for at in range(0, len(level), width)]
        level = [
            _joined(f"node_{len(calls) + number}", REDUCE, group, tokens, seed=len(calls) + number)
            for number, group in enumerate(groups)
        ]
        calls += level
    return Application(name, "tree", tuple(calls), (calls[-1].name,))


def _joined(
    name: str, words: str, calls: Sequence[Call], tokens: int, *, seed: int, objective: str = ""
) -> Call:
    prompt: list[Part] = [words]
    for call in calls:
        prompt += ["\n- ", Output(call.name)]
    prompt.append(OF_ALL)
    return Call(name, tuple(prompt), tokens, seed=seed, objective=objective, role="reduce")
