"""The applications of the Parrot paper (OSDI '24) as calls with real prompts.

Numbers, lengths and arrival times are those of `parrot_bench.simulator.figures`, which the
simulator runs too; prompts are passages of the book. Prompts begin with a salt, so that no run
finds what another one has filled. Differences from the paper are noted at each workload.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice
from typing import TypeAlias

from parrot_bench.apps import book
from parrot_bench.apps.workload import Call, Job, Output, Prompt, Size, Workload
from parrot_bench.simulator import figures
from parrot_bench.simulator.figures import ARCHITECT, CODERS, REVIEWERS, REVISERS

#: Chunks of a document: about 20 in the paper's chains, fewer where chats run at the same time.
MIXED_CHUNKS = 16
#: Chats a second, and calls of GPTs, before the time between arrivals is scaled like the lengths.
#: The latter is a quarter of the paper's lowest rate, which is about what four engines of the demo
#: model on two cores can do.
CHAT_RATE, GPTS_RATE = 1.0, 0.25
#: Seconds between documents on average, scaled like the lengths.
DOCUMENT_GAP_S = 2.0
#: More than a job has calls: the same call of two jobs differs in its seed.
SEEDS = 1000
#: Of all draws.
_DRAWS = 2024

#: The beginning of a prompt, made of the words that all prompts of its template begin with.
Opening: TypeAlias = Callable[[str], str]


def salt_first(salt: str) -> Opening:
    """Nothing is found in a prefix cache."""
    return lambda words: f"{salt}\n{words}"


def words_first(salt: str) -> Opening:
    """As programs write prompts: the template's words, and nothing after the salt, may be found."""
    return lambda words: f"{words}\n{salt}"


def chain(size: Size, salt: str) -> Workload:
    """Figure 11: a summary refined chunk by chunk, `size.count` steps; the last one is read."""
    calls: list[Call] = []
    for step, chunk in enumerate(book.chunks(size.count, size.characters(figures.CHUNK_TOKENS))):
        head = f"{salt}\nSummarise a book in one sentence, part by part.\n"
        if calls:
            prompt: Prompt = (
                head + "The summary of the parts before: ",
                Output(calls[-1].name),
                f"\nRefine it with the next part:\n{chunk}\nThe refined summary:",
            )
        else:
            prompt = (f"{head}The first part:\n{chunk}\nThe summary:",)
        calls.append(Call(f"step_{step}", prompt, size.tokens(figures.SUMMARY_TOKENS), seed=step))
    job = Job("chain", "chain", tuple(calls), (calls[-1].name,))
    # NOTE: each call reads the one before: a client that sends in parallel is the same client.
    return Workload("chain", (job,), ("one by one",))


def map_reduce(size: Size, salt: str) -> Workload:
    """Figure 13: `size.count` chunks summarised apart, then together."""
    return Workload("map-reduce", (summary(size, salt_first(salt)),), ("one by one", "parallel"))


def summary(
    size: Size,
    opening: Opening,
    *,
    prefix: str = "",
    arrives_s: float = 0.0,
    objective: str = "",
    first_seed: int = 0,
) -> Job:
    """One summary, its calls named with `prefix` in front, their seeds from `first_seed` on."""
    tokens = size.tokens(figures.SUMMARY_TOKENS)
    chunks = book.chunks(size.count, size.characters(figures.CHUNK_TOKENS))
    head = opening("Summarise this part of a book in one sentence:")
    maps = [
        Call(
            f"{prefix}map_{number}",
            (f"{head}\n{chunk}\nThe summary:",),
            tokens,
            seed=first_seed + number,
            objective=objective,
        )
        for number, chunk in enumerate(chunks)
    ]
    prompt: list[str | Output] = [opening("Make one summary of these summaries:")]
    for each in maps:
        prompt += ["\n- ", Output(each.name)]
    prompt.append("\nThe summary of all:")
    last = Call(
        f"{prefix}reduce", tuple(prompt), tokens, seed=first_seed + size.count, objective=objective
    )
    return Job(f"{prefix}reduce", "map-reduce", (*maps, last), (last.name,), arrives_s)


def documents(size: Size, salt: str) -> Workload:
    """`size.count` documents, each as in figure 13, as one Poisson process."""
    draw = random.Random(_DRAWS + size.seed)
    jobs: list[Job] = []
    arrives_s = 0.0
    for number in range(size.count):
        job = summary(
            replace(size, count=MIXED_CHUNKS),
            words_first(f"{salt} Document {number}."),
            prefix=f"document_{number}_",
            arrives_s=arrives_s,
            first_seed=number * SEEDS,
        )
        jobs.append(job)
        arrives_s += draw.expovariate(1 / DOCUMENT_GAP_S) * size.scale
    return Workload("map-reduce", tuple(jobs), ("parallel",))


def chat(size: Size, salt: str) -> Workload:
    """Figure 18: `size.count` chats and, in proportion, summaries that share nothing."""
    return Workload(
        "chat",
        (*chats(size, salt), *summaries(size, salt, salt_first, one_document=False)),
        ("parallel",),
        per_token=("chat",),
    )


def mixed(size: Size, salt: str) -> Workload:
    """Figure 18 on several engines: as `chat`, but all the summaries are of one document, as the
    paper's were: what one job has filled, another can find again, if its calls come to the same
    engine.
    """
    return Workload(
        "mixed",
        (*chats(size, salt), *summaries(size, salt, salt_first, one_document=True)),
        ("parallel",),
        per_token=("chat",),
    )


def chats(size: Size, head: str) -> list[Job]:
    """`size.count` chats, evenly one after the other, each with its own prompt after `head`."""
    draw = random.Random(_DRAWS + size.seed)
    jobs: list[Job] = []
    for number in range(size.count):
        prompt, answer = figures.chat_lengths(draw)
        text = book.passage(size.characters(prompt), start=number * 3500)
        call = Call(
            f"chat_{number}",
            (f"{head} Chat {number}.\n{text}",),
            size.tokens(answer),
            seed=number,
            objective="latency",
        )
        jobs.append(Job(call.name, "chat", (call,), (call.name,), number / CHAT_RATE * size.scale))
    return jobs


def summaries(
    size: Size, salt: str, opening: Callable[[str], Opening], *, one_document: bool
) -> list[Job]:
    """The map-reduce jobs beside `size.count` chats; times are scaled like the lengths."""
    share = size.count / figures.MIXED_CHATS
    gaps = islice(cycle(figures.SUMMARY_GAPS_S), max(0, round(figures.MIXED_SUMMARIES * share) - 1))
    return [
        summary(
            replace(size, count=MIXED_CHUNKS),
            opening(salt if one_document else f"{salt} Job {number}."),
            prefix=f"job_{number}_",
            arrives_s=arrives_s * size.scale,
            objective="throughput",
            first_seed=number * SEEDS if one_document else 0,
        )
        for number, arrives_s in enumerate(
            accumulate(gaps, initial=figures.SUMMARIES_AFTER_S * share)
        )
    ]


def gpts(size: Size, salt: str) -> Workload:
    """Figure 16: calls of four applications with long system prompts, `size.count` in whole fours,
    as one Poisson process. A query of a few words ends each prompt.
    """
    draw = random.Random(_DRAWS + size.seed)
    names = [gpt.name.replace("-", "_") for gpt in figures.GPTS]
    systems = [
        f"{salt} You are {name}.\n"
        + book.passage(size.characters(gpt.system), start=number * 30_000)
        for number, (name, gpt) in enumerate(zip(names, figures.GPTS, strict=True))
    ]
    order = list(range(len(names))) * max(1, round(size.count / len(names)))
    draw.shuffle(order)
    jobs: list[Job] = []
    arrives_s = 0.0
    for number, which in enumerate(order):
        call = Call(
            f"{names[which]}_{number}",
            (f"{systems[which]}\nQuery {number}:",),
            size.tokens(figures.GPTS[which].output),
            seed=number,
            objective="latency",
        )
        jobs.append(Job(call.name, "gpts", (call,), (call.name,), arrives_s))
        arrives_s += draw.expovariate(GPTS_RATE) * size.scale
    return Workload("gpts", tuple(jobs), ("parallel",), per_token=("gpts",))


def multi_agent(size: Size, salt: str) -> Workload:
    """Figure 17: an architect, a coder for each of `size.count` files, then four times a reviewer
    and a reviser for each file, all agents of a round in parallel: ten rounds.

    Agents of a round share a long prefix: the instructions and the design, then all files. More
    than eight branches repeat the files. Unlike in the recorded trace, each agent ends on its own
    file's tail, and the architect runs once; the lengths are the recorded ones.
    """
    return Workload("multi-agent", (coding(size, salt_first(salt)),), ("parallel",))


def coding(size: Size, opening: Opening, *, number: int = 0, arrives_s: float = 0.0) -> Job:
    """One program written by `size.count` agents a round; `number` tells programs apart."""
    branches = range(size.count)
    calls: list[Call] = []
    prefix = f"program_{number}_" if number else ""

    def add(name: str, prompt: Prompt, tokens: int) -> str:
        seed = number * SEEDS + len(calls)
        calls.append(Call(prefix + name, prompt, size.tokens(tokens), seed=seed))
        return prefix + name

    requirements = book.passage(size.characters(ARCHITECT.prompt), start=number * 3500)
    design = add("design", (f"{opening('Design it.')}\n{requirements}\n",), ARCHITECT.outputs[0])
    # Without the design, and without the files.
    guide = book.passage(size.characters(CODERS.prompt - ARCHITECT.outputs[0]), start=4000)
    rules = book.passage(size.characters(REVIEWERS.prompt - sum(CODERS.outputs)), start=16_000)
    files = [
        add(
            f"code_{i}",
            (f"{opening(guide)}\nDesign:\n", Output(design), f"\nWrite file {i}."),
            CODERS.outputs[i % 8],
        )
        for i in branches
    ]
    for turn in range(figures.REVIEWS):
        shared: list[str | Output] = [f"{opening(rules)}\nFiles:"]
        for i in branches:
            shared += [f"\nFile {i}:\n", Output(files[i])]
        reviews = [
            add(f"review_{turn}_{i}", (*shared, f"\nReview file {i}."), REVIEWERS.outputs[i % 8])
            for i in branches
        ]
        files = [
            add(
                f"revise_{turn}_{i}",
                (*shared, f"\nRevise file {i}.\nIts review: ", Output(reviews[i])),
                REVISERS.outputs[i % 8],
            )
            for i in branches
        ]
    return Job(f"{prefix}multi-agent", "multi-agent", tuple(calls), tuple(files), arrives_s)


@dataclass(frozen=True, slots=True)
class Recipe:
    build: Callable[[Size, str], Workload]
    count: int
    #: On a CPU with the demo model.
    scale: float
    #: What `count` counts.
    what: str
    #: Whether it is for several engines: policies of placement are compared by it.
    by_policy: bool = False


#: By the names of the command line.
RECIPES = {
    "chain": Recipe(chain, 20, 0.25, "steps"),
    "map-reduce": Recipe(map_reduce, 16, 0.25, "chunks"),
    "multi-agent": Recipe(multi_agent, 8, 0.125, "branches"),
    "chat": Recipe(chat, 40, 0.25, "chats"),
    "gpts": Recipe(gpts, 40, 0.2, "calls", by_policy=True),
    "mixed": Recipe(mixed, 40, 0.25, "chats", by_policy=True),
}
