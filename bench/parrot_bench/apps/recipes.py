"""The applications that `bench apps` runs: the Parrot paper's (OSDI '24), and agents.

Numbers, lengths and arrival times are those of `parrot_bench.applications.figures`, which the
simulator runs too. Each run has a salt behind the template's words, as programs write prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice

from parrot_bench.applications import conversations, figures
from parrot_bench.applications.coding import coding
from parrot_bench.applications.conversations import AgentLimits, agent
from parrot_bench.applications.description import Application, Passage
from parrot_bench.applications.summaries import chain, map_reduce
from parrot_bench.apps.workload import Size, Workload, live

#: Chunks of a document: about 20 in the paper's chains, fewer where chats run at the same time.
MIXED_CHUNKS = 16
#: Chats a second, and calls of GPTs, before the time between arrivals is scaled like the lengths.
#: The latter is a quarter of the paper's lowest rate, which is about what four engines of the demo
#: model on two cores can do.
CHAT_RATE, GPTS_RATE = 1.0, 0.25
#: Seconds between documents on average, and between programs, agents and sessions, scaled alike.
DOCUMENT_GAP_S, PROGRAM_GAP_S, AGENT_GAP_S, SESSION_GAP_S = 2.0, 4.0, 1.5, 0.6
#: Files of each program where several are written.
FILES = 4
#: Agents have a share of the recorded turns; their pauses are those of tools alone.
AGENT_LIMITS = AgentLimits(
    turns=0.07,
    turns_min=2,
    output_max=4096,
    result_max=8192,
    pause_max_s=30.0,
    window=40_000,
    stops=True,
)
#: Of all draws; and more than there are agents: those of another seed are others.
_DRAWS, _AGENTS = 2024, 1_000_003


def _draw(size: Size) -> random.Random:
    return random.Random(_DRAWS + size.seed)


def _document(size: Size, name: str) -> list[Passage]:
    tokens = size.tokens(figures.CHUNK_TOKENS)
    return [Passage(name, tokens, number) for number in range(size.count)]


def _summary(size: Size, name: str, document: str = "", objective: str = "") -> Application:
    tokens = size.tokens(figures.SUMMARY_TOKENS)
    return map_reduce(name, _document(size, document), tokens, objective=objective)


def chain_summary(size: Size, salt: str) -> Workload:
    """Figure 11: a summary refined chunk by chunk, `size.count` steps; the last one is read."""
    job = chain("chain", _document(size, ""), size.tokens(figures.SUMMARY_TOKENS))
    return Workload("chain", live([job], size, lambda _: salt))


def summary(size: Size, salt: str) -> Workload:
    """Figure 13: `size.count` chunks summarised apart, then together."""
    return Workload("map-reduce", live([_summary(size, "summary")], size, lambda _: salt))


def documents(size: Size, salt: str) -> Workload:
    """`size.count` documents, each as in figure 13, as one Poisson process."""
    draw = _draw(size)
    arrives_s = accumulate(
        (draw.expovariate(1 / DOCUMENT_GAP_S) * size.scale for _ in range(size.count - 1)),
        initial=0.0,
    )
    each = replace(size, count=MIXED_CHUNKS)
    jobs = [
        replace(_summary(each, f"document-{number}"), arrives_s=at)
        for number, at in enumerate(arrives_s)
    ]
    return Workload("map-reduce", live(jobs, size, lambda job: f"{salt} {job.name}."))


def _chats(size: Size) -> Iterator[Application]:
    """`size.count` chats, evenly one after the other, each with its own prompt."""
    draw = _draw(size)
    for number in range(size.count):
        prompt, answer = figures.chat_lengths(draw)
        said = Passage(f"chat {number}", size.tokens(prompt))
        job = conversations.chat(f"chat-{number}", [(said, size.tokens(answer))])
        calls = tuple(
            replace(call, prompt=("Answer the user.\n", *call.prompt)) for call in job.calls
        )
        yield replace(job, calls=calls, arrives_s=number / CHAT_RATE * size.scale)


def _summaries_beside(size: Size) -> Iterator[Application]:
    """The map-reduce applications beside `size.count` chats; times are scaled like the lengths."""
    share = size.count / figures.MIXED_CHATS
    gaps = islice(cycle(figures.SUMMARY_GAPS_S), max(0, round(figures.MIXED_SUMMARIES * share) - 1))
    times = accumulate(gaps, initial=figures.SUMMARIES_AFTER_S * share)
    for number, arrives_s in enumerate(times):
        each = replace(size, count=MIXED_CHUNKS)
        job = _summary(each, f"job-{number}", objective="throughput")
        yield replace(job, arrives_s=arrives_s * size.scale)


def _mixed(name: str, size: Size, salt: str, *, one_document: bool) -> Workload:
    def salt_of(job: Application) -> str:
        return salt if one_document and job.kind == "map-reduce" else f"{salt} {job.name}."

    jobs = live([*_chats(size), *_summaries_beside(size)], size, salt_of)
    return Workload(name, jobs, per_token=("chat",))


def chat(size: Size, salt: str) -> Workload:
    """Figure 18: `size.count` chats and, in proportion, summaries that share nothing."""
    return _mixed("chat", size, salt, one_document=False)


def mixed(size: Size, salt: str) -> Workload:
    """Figure 18 on several engines: as `chat`, but all the summaries are of one document, as the
    paper's were: what one has filled, another can find again, if its calls come to the same engine.
    """
    return _mixed("mixed", size, salt, one_document=True)


def gpts(size: Size, salt: str) -> Workload:
    """Figure 16: calls of four applications with long system prompts, `size.count` in whole fours,
    as one Poisson process. A query of a few words ends each prompt.
    """
    draw = _draw(size)
    order = list(figures.GPTS) * max(1, round(size.count / len(figures.GPTS)))
    draw.shuffle(order)
    jobs: list[Application] = []
    arrives_s = 0.0
    for number, gpt in enumerate(order):
        system = (f"You are {gpt.name}.\n", Passage(gpt.name, size.tokens(gpt.system)))
        query = (f"\nQuery {number}:",)
        job = conversations.question(
            f"{gpt.name}-{number}", "gpts", system, query, size.tokens(gpt.output)
        )
        jobs.append(replace(job, arrives_s=arrives_s))
        arrives_s += draw.expovariate(GPTS_RATE) * size.scale
    return Workload("gpts", live(jobs, size, lambda _: salt), per_token=("gpts",))


def program(size: Size, salt: str) -> Workload:
    """Figure 17: one program of `size.count` files, all agents of a round in parallel."""
    job = coding("program", size.count, size.scale)
    return Workload("multi-agent", live([job], size, lambda _: salt))


def programs(size: Size, salt: str) -> Workload:
    """Figure 17: `size.count` programs, each by an architect, coders, reviewers and revisers."""
    jobs = [
        replace(
            coding(f"program-{number}", FILES, size.scale),
            arrives_s=number * PROGRAM_GAP_S * size.scale,
        )
        for number in range(size.count)
    ]
    return Workload("multi-agent", live(jobs, size, lambda job: f"{salt} {job.name}."))


def agents(size: Size, salt: str) -> Workload:
    """`size.count` agents of three kinds with tools, each kind with its own system prompt."""
    return _agents("agents", size, salt, ("coder", "researcher", "clerk"), AGENT_GAP_S)


def sessions(size: Size, salt: str) -> Workload:
    """`size.count` agents behind one system prompt."""
    return _agents("sessions", size, salt, ("coder",), SESSION_GAP_S)


def _agents(name: str, size: Size, salt: str, roles: tuple[str, ...], gap_s: float) -> Workload:
    jobs = []
    for number in range(size.count):
        role = roles[number % len(roles)]
        job = agent(
            f"agent-{number}",
            name,
            random.Random(number + size.seed * _AGENTS),
            Passage(f"the rules of a {role}", size.tokens(figures.SYSTEM_TOKENS)),
            Passage(f"task {number} of {size.seed}", size.tokens(figures.TASK_TOKENS)),
            AGENT_LIMITS,
            size.scale,
        )
        jobs.append(replace(job, arrives_s=number * gap_s * size.scale))
    return Workload(name, live(jobs, size, lambda job: f"{salt} {job.name}."))


@dataclass(frozen=True, slots=True)
class Recipe:
    build: Callable[[Size, str], Workload]
    count: int
    #: On a CPU with the demo model.
    scale: float
    #: What `count` counts.
    what: str


#: Compared by the way of calling; names are those of the command line.
BY_WAY = {
    "chain": Recipe(chain_summary, 20, 0.25, "steps"),
    "map-reduce": Recipe(summary, 16, 0.25, "chunks"),
    "multi-agent": Recipe(program, 8, 0.125, "files"),
    "chat": Recipe(chat, 40, 0.25, "chats"),
}
#: Many applications at once, compared by the scheduler's policy and by linking.
MANY = {
    "gpts": Recipe(gpts, 40, 0.2, "calls"),
    "mixed": Recipe(mixed, 40, 0.25, "chats"),
    "agents": Recipe(agents, 64, 0.04, "agents"),
    "multi-agent": Recipe(programs, 6, 0.2, "programs"),
    "map-reduce": Recipe(documents, 24, 0.25, "documents"),
    "sessions": Recipe(sessions, 200, 0.04, "agents"),
}
#: Tools run between the calls of these: their graph cannot be declared ahead.
WITH_TOOLS = ("agents", "sessions")
