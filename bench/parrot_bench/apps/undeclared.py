"""Applications that declare nothing: many instances at once, prompts as programs write them.

Words that all calls of a template have in common come first, then what is the instance's own. So an
engine may find those words in its cache, also from an earlier run, and calls of one template can be
told by them. Numbers and lengths are those of `parrot_bench.simulator`, as in `applications`.
"""

from __future__ import annotations

import random
from dataclasses import replace

from parrot_bench.apps import book
from parrot_bench.apps.applications import SEEDS, Recipe, chats, coding, summaries, words_first
from parrot_bench.apps.workload import Call, Job, Message, Output, Size, Workload
from parrot_bench.simulator import figures
from parrot_bench.simulator.workloads import agents as recorded

#: Files of each program; seconds between programs, agents and sessions, scaled like the lengths.
FILES = 4
PROGRAM_GAP_S, AGENT_GAP_S, SESSION_GAP_S = 4.0, 1.5, 0.6
#: Share of the recorded number of turns; fewest turns; and tokens of the longest prompt.
TURNS, TURNS_MIN, CONTEXT_TOKENS = 0.07, 2, 40_000
#: Recorded pauses hold people too; tools alone take no longer than this.
PAUSE_MAX_S = 30.0
#: More than there are agents: those of another seed are others.
_AGENTS = 1_000_003


def multi_agent(size: Size, salt: str) -> Workload:
    """Figure 17: `size.count` programs, each by an architect, coders, reviewers and revisers."""
    each = replace(size, count=FILES)
    jobs = (
        coding(
            each,
            words_first(f"{salt} Program {number}."),
            number=number,
            arrives_s=number * PROGRAM_GAP_S * size.scale,
        )
        for number in range(size.count)
    )
    return Workload("multi-agent", tuple(jobs), ("parallel",))


def mixed(size: Size, salt: str) -> Workload:
    """Figure 18: `size.count` chats, beside summaries of one document."""
    beside = summaries(size, salt, words_first, one_document=True)
    jobs = (*chats(size, words_first(salt)("Answer the user.")), *beside)
    return Workload("mixed", jobs, ("parallel",), per_token=("chat",))


def agents(size: Size, salt: str) -> Workload:
    """`size.count` agents of three kinds with tools, each kind with its own system prompt."""
    return _agents("agents", size, salt, ("coder", "researcher", "clerk"), AGENT_GAP_S)


def sessions(size: Size, salt: str) -> Workload:
    """`size.count` agents behind one system prompt."""
    return _agents("sessions", size, salt, ("coder",), SESSION_GAP_S)


def _agents(name: str, size: Size, salt: str, roles: tuple[str, ...], gap_s: float) -> Workload:
    systems = [
        f"You are the {role}.\n"
        + book.passage(size.characters(recorded.SYSTEM_TOKENS), start=number * 30_000)
        for number, role in enumerate(roles)
    ]
    jobs = (
        _agent(size, salt, number, systems[number % len(systems)], name, gap_s)
        for number in range(size.count)
    )
    return Workload(name, tuple(jobs), ("parallel",))


def _agent(size: Size, salt: str, number: int, system: str, kind: str, gap_s: float) -> Job:
    """Turns that each hold all before; a tool's result comes as the user's message."""
    draw = random.Random(number + size.seed * _AGENTS)
    turns = figures.lognormal(draw, mean=recorded.TURNS_MEAN, median=recorded.TURNS_MEDIAN)
    task = book.passage(size.characters(recorded.TASK_TOKENS), draw.randrange(100_000))
    history: tuple[Message, ...] = (Message("system", (system,)),)
    prompt = f"{salt} Task {number}: {task}"
    length = float(recorded.SYSTEM_TOKENS + recorded.TASK_TOKENS)
    calls: list[Call] = []
    while len(calls) < max(TURNS_MIN, round(turns * TURNS)):
        answer = min(
            figures.lognormal(draw, mean=recorded.OUTPUT_MEAN, median=recorded.OUTPUT_MEDIAN), 4096
        )
        result = min(
            figures.lognormal(draw, mean=recorded.RESULT_MEAN, median=recorded.RESULT_MEDIAN), 8192
        )
        pause_s = min(recorded.gap_s(draw), PAUSE_MAX_S) * size.scale if calls else 0.0
        if calls and length + answer > CONTEXT_TOKENS:
            break
        call = Call(
            f"agent_{number}_turn_{len(calls)}",
            (prompt,),
            size.tokens(answer),
            seed=number * SEEDS + len(calls),
            objective="latency",
            history=history,
            pause_s=pause_s,
        )
        calls.append(call)
        said = Message("assistant", (Output(call.name),))
        history = (*history, Message("user", call.prompt), said)
        prompt = "Result: " + book.passage(size.characters(result), draw.randrange(100_000))
        length += answer + result
    last = calls[-1].name
    arrives_s = number * gap_s * size.scale
    return Job(f"agent_{number}", kind, tuple(calls), (last,), arrives_s)


#: By the names of the command line.
RECIPES = {
    "multi-agent": Recipe(multi_agent, 6, 0.2, "programs"),
    "agents": Recipe(agents, 64, 0.04, "agents"),
    "mixed": Recipe(mixed, 40, 0.25, "chats"),
    "sessions": Recipe(sessions, 200, 0.04, "agents"),
}
