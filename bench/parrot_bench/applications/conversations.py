"""Chats, questions behind long system prompts, agents with tools, and agents that debate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from parrot_bench.applications.description import (
    Application,
    Call,
    Message,
    Output,
    Part,
    Passage,
    Prompt,
)
from parrot_bench.applications.figures import (
    GAPS,
    OUTPUT_MEAN,
    OUTPUT_MEDIAN,
    RESULT_MEAN,
    RESULT_MEDIAN,
    TURNS_MAX,
    TURNS_MEAN,
    TURNS_MEDIAN,
    WINDOW_SUMMARY_TOKENS,
    gap_s,
    lognormal,
)

AGENT_RULES = (
    "You are a careful research agent. Work step by step, call one tool at a time, and say clearly "
    "what you have found before you go on. Never invent facts that no tool has returned. When you "
    "have enough, answer the user's question in a short paragraph and stop."
)


def question(
    name: str, kind: str, system: Prompt, query: Prompt, tokens: int, *, as_chat: bool = False
) -> Application:
    """One call behind a system prompt that many share, for somebody who waits."""
    history = (Message("system", system),) if as_chat else ()
    prompt = query if as_chat else (*system, *query)
    call = Call("ask", prompt, tokens, objective="latency", history=history, role=kind)
    return Application(name, kind, (call,), (call.name,))


def chat(
    name: str, turns: Sequence[tuple[Passage, int]], pauses_s: Sequence[float] = ()
) -> Application:
    """A person's conversation: what the person says, and the tokens of each answer."""
    history: tuple[Message, ...] = (Message("system", ("You are a helpful assistant.",)),)
    calls: list[Call] = []
    for number, (said, tokens) in enumerate(turns):
        call = Call(
            f"turn_{number}",
            (said,),
            tokens,
            seed=number,
            objective="latency",
            history=history if len(turns) > 1 else (),
            pause_s=pauses_s[number - 1] if number and pauses_s else 0.0,
            role="chat",
        )
        calls.append(call)
        history = (*history, *_turn(call))
    return Application(name, "chat", tuple(calls), (calls[-1].name,))


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """The bounds of the draws that make an agent; lengths are tokens before scaling."""

    #: Factor on the recorded number of turns, and the fewest and most of them.
    turns: float = 1.0
    turns_min: int = 1
    turns_max: int = TURNS_MAX
    output_max: float = 8192
    result_max: float = 25_000
    #: Longer pauses are cut to this, in seconds, and all are multiplied by `pauses`.
    pause_max_s: float = GAPS[-1][0]
    pauses: float = 1.0
    #: At this length the agent goes on with a summary of all before, or stops.
    window: int = 0
    stops: bool = False


def agent(
    name: str,
    kind: str,
    draw: Random,
    system: Passage,
    task: Passage,
    limits: AgentLimits,
    scale: float = 1.0,
) -> Application:
    """A coding agent: each turn reads all before it and the result of a tool.

    Numbers of turns, lengths and pauses are drawn as 710 recorded agents had them (`figures`).
    """

    def length(tokens: float) -> int:
        return max(1, round(tokens * scale))

    turns = lognormal(draw, mean=TURNS_MEAN, median=TURNS_MEDIAN)
    turns = min(limits.turns_max, round(min(turns, TURNS_MAX) * limits.turns))
    opening = Message("system", (system,))
    history: tuple[Message, ...] = (opening,)
    prompt: Prompt = ("Task:\n", task)
    used = start = system.tokens + task.tokens
    calls: list[Call] = []
    for number in range(max(limits.turns_min, int(turns))):
        output = length(
            min(limits.output_max, lognormal(draw, mean=OUTPUT_MEAN, median=OUTPUT_MEDIAN))
        )
        pause_s = min(gap_s(draw), limits.pause_max_s) * limits.pauses if number else 0.0
        result = length(
            min(limits.result_max, lognormal(draw, mean=RESULT_MEAN, median=RESULT_MEDIAN))
        )
        is_full = limits.window and used + output > length(limits.window)
        if is_full and limits.stops and calls:
            break
        call = Call(
            f"turn_{number}",
            prompt,
            output,
            seed=number,
            objective="latency",
            history=history,
            pause_s=pause_s,
            role="agent",
            last="tool" if number else "user",
        )
        calls.append(call)
        history = (*history, *_turn(call))
        prompt = (Passage(f"result {number} of {name}", result),)
        used += output + result
        if is_full and not limits.stops:
            summary = Passage(f"summary {number} of {name}", length(WINDOW_SUMMARY_TOKENS))
            history, prompt, used = (opening,), (summary,), start
    return Application(name, kind, tuple(calls), (calls[-1].name,))


def researcher(name: str, question: Passage, results: Sequence[int], tokens: int) -> Application:
    """An agent that calls a tool for each of `results` (tokens), answers, and names its answer."""
    history: tuple[Message, ...] = (Message("system", (AGENT_RULES,)),)
    prompt: Prompt = ("Question: ", question)
    calls: list[Call] = []
    for number, result in enumerate([*results, 0]):
        call = Call(
            f"turn_{number}",
            prompt,
            tokens,
            seed=number,
            history=history,
            role="agent",
            last="tool" if number else "user",
        )
        calls.append(call)
        history = (*history, *_turn(call))
        prompt = (Passage(f"result {number} of {name}", max(1, result)),)
    calls.append(_title(calls[-1].name, len(calls)))
    return Application(name, "researcher", tuple(calls), (calls[-1].name,))


def planned(name: str, question: Passage, tokens: int) -> Application:
    """A graph of templates: a plan, a look-up by it, an answer from both, its title."""
    asked: Prompt = ("Question: ", question)
    plan: Prompt = (*asked, "\nThe plan: ", Output("plan"))
    calls = (
        Call("plan", (*asked, "\nMake a plan."), tokens, role="planner"),
        Call("find", (*plan, "\nLook up somebody."), tokens, seed=1, role="finder"),
        Call(
            "answer",
            (*plan, "\nFound: ", Output("find"), "\nAnswer."),
            tokens,
            seed=2,
            role="answerer",
        ),
        _title("answer", 3),
    )
    return Application(name, "planned", calls, ("title",))


def debate(
    name: str, question: Passage, tokens: int, *, agents: int = 3, rounds: int = 3
) -> Application:
    """Agents that keep a history each and read the others' last answers, round by round."""
    topic: Prompt = ("Question to debate: ", question, "\nGive your position in a short paragraph.")
    histories: list[tuple[Message, ...]] = [()] * agents
    prompts: list[Prompt] = [topic] * agents
    calls: list[Call] = []
    for turn in range(rounds):
        made = [
            Call(
                f"agent_{number}_round_{turn}",
                prompts[number],
                tokens,
                seed=turn * agents + number,
                history=histories[number],
                role="debater",
            )
            for number in range(agents)
        ]
        calls += made
        histories = [(*histories[number], *_turn(made[number])) for number in range(agents)]
        for number in range(agents):
            heard: list[Part] = ["These are the answers of the others:"]
            for other in range(agents):
                if other != number:
                    heard += ["\n\nOne agent's response: ```", Output(made[other].name), "```"]
            prompts[number] = (*heard, "\n\nUpdate yours.")
    finals = tuple(call.name for call in calls[-agents:])
    return Application(name, "debate", tuple(calls), finals)


def _turn(call: Call) -> tuple[Message, Message]:
    """The messages that a call adds to the history: its prompt and its answer."""
    return Message(call.last, call.prompt), Message("assistant", (Output(call.name),))


def _title(of: str, seed: int) -> Call:
    prompt = ("Give this a title of at most five words:\n", Output(of))
    return Call("title", prompt, 8, seed=seed, role="title", writes="title")
