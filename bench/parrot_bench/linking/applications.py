"""The example applications with their headers stripped: instances share templates, not texts.

Every recipe adds one session's calls to a script. What models answer is drawn.
"""

from __future__ import annotations

from collections.abc import Callable

from parrot_bench.linking.script import (
    PERSON_S,
    TOOL_S,
    Chain,
    Script,
    system,
    tool_call,
    tool_result,
    user,
)
from parrot_bench.linking.text import Text

AGENT_RULES = (
    "You are a careful research agent. Work step by step, call one tool at a time, and say clearly "
    "what you have found before you go on. Never invent facts that no tool has returned. When you "
    "have enough, answer the user's question in a short paragraph and stop."
)
_SUMMARISE = "Summarise this part of a document in a few sentences, keep names and numbers:\n\n"
_COPILOT = (
    "You are the copilot of a large office product. You answer in the tone of the house, short and "
    "polite, and you never give legal advice. " * 12
)


def chain_summary(script: Script, text: Text) -> None:
    """A summary refined part by part; the last one is read by a person."""
    summary = last = None
    for part in range(8):
        document = text.prose(2000)
        role = "summarise"
        if last is None:
            prompt, reads = f"{_SUMMARISE}{document}\n\nThe summary:", list[str]()
        else:
            role = "refine"
            prompt = (
                f"The summary of the parts before:\n{summary}\n\nRefine it with part {part + 1} of "
                f"the document:\n{document}\n\nThe refined summary:"
            )
            reads = [last]
        summary = text.answer(400)
        last = script.ask(prompt, summary, reads=reads, role=role)


def map_reduce(script: Script, text: Text) -> None:
    """Parts summarised apart, then together."""
    summaries = {}
    for _ in range(text.draw.randint(4, 12)):
        summary = text.answer()
        call = script.ask(_SUMMARISE + text.prose(2000), summary, role="summarise")
        summaries[call] = summary
    joined = "\n\n".join(f"Part {i}:\n{part}" for i, part in enumerate(summaries.values()))
    prompt = f"These are summaries of the parts of one document. Join them.\n\n{joined}\n\nSummary:"
    script.ask(prompt, text.answer(), reads=summaries, role="reduce")


def tree_summary(script: Script, text: Text) -> None:
    """Parts summarised, then summaries of three at a time up to the root."""
    level = {}
    for _ in range(9):
        answer = text.answer(500)
        level[script.ask(_SUMMARISE + text.prose(1500), answer, role="summarise")] = answer
    while len(level) > 1:
        above, nodes = {}, list(level.items())
        for at in range(0, len(nodes), 3):
            group = nodes[at : at + 3]
            context = "\n".join(answer for _, answer in group)
            answer = text.answer(500)
            prompt = f"Context information is below.\n---------------------\n{context}\n"
            prompt += "---------------------\nGiven it and no prior knowledge, summarise:\n"
            call = script.ask(prompt, answer, reads=[name for name, _ in group], role="join")
            above[call] = answer
        level = above


def multi_agent(script: Script, text: Text) -> None:
    """An architect, a coder for each file, then twice reviewers and revisers of all files.

    A revised file is mostly the old file. Its readers read the reviser, not the coder.
    """
    goal, design = text.prose(600), text.answer(1500)
    prompt = f"Design a Python program.\nRequirements:\n{goal}"
    architect = script.ask(prompt, design, role="architect")
    files: dict[str, str] = {}
    for number in range(4):
        code = f"```python\n{text.code(text.draw.randint(2, 5))}```"
        prompt = f"You write one file of a program.\nThe design:\n{design}\n\nWrite file {number}."
        files[script.ask(prompt, code, reads=[architect], role="coder")] = code
    for _ in range(2):
        listing = "\n\n".join(f"# File {i}\n{code}" for i, code in enumerate(files.values()))
        reviews = {}
        for number in range(len(files)):
            prompt = f"You review code.\nAll files:\n{listing}\n\nReview file {number}."
            review = text.answer(500)
            reviews[script.ask(prompt, review, reads=files, role="reviewer")] = review
        revised = {}
        for number, (review, (name, comment)) in enumerate(
            zip(files.values(), reviews.items(), strict=True)
        ):
            lines = review.split("\n")
            lines[text.draw.randrange(2, len(lines) - 1)] = f"    {text.name()} = {text.name()}()"
            prompt = f"You revise code.\nAll files:\n{listing}\n\nRevise file {number}. Its review:"
            reads = [*files, name]
            new = "\n".join(lines)
            call = script.ask(f"{prompt}\n{comment}", new, reads=reads, role="reviser")
            revised[call] = new
        files = revised


def tool_agent(script: Script, text: Text) -> None:
    """A loop with tool calls by id; a last call gives the answer a title."""
    chain = Chain(script, [system(AGENT_RULES), user(f"Question: {text.sentence()}")])
    for _ in range(text.draw.randint(2, 8)):
        call = text.identifier()
        said = text.answer(120) if text.draw.random() < 0.4 else None
        arguments = f'{{"query": "{text.name()} {text.name()}", "limit": 5}}'
        chain.call(tool_call(call, "search", arguments, said), pause_s=TOOL_S, role="agent")
        chain.hear(tool_result(call, text.prose(text.draw.choice((40, 400, 3000)))))
    answer = text.answer()
    last = chain.call(answer, pause_s=TOOL_S, role="agent")
    prompt = f"Give this a title of at most five words:\n{answer}"
    script.ask(prompt, text.name(), reads=[last], role="title")


def planned_agent(script: Script, text: Text) -> None:
    """A graph of templates: a plan, a look-up by it, an answer from both, its title."""
    question = f"Question: {text.sentence()}"
    plan, found, answer = text.answer(300), text.answer(400), text.answer(400)
    planner = script.ask(f"{question}\nMake a plan.", plan, role="planner")
    prompt = f"{question}\nThe plan: {plan}\nLook up somebody."
    finder = script.ask(prompt, found, reads=[planner], role="finder")
    prompt = f"{question}\nThe plan: {plan}\nFound: {found}\nAnswer."
    reads = [planner, finder]
    last = script.ask(prompt, answer, reads=reads, pause_s=TOOL_S, role="answerer")
    script.ask(f"Give this a title: {answer}", text.sentence(), reads=[last], role="titler")


def debate(script: Script, text: Text) -> None:
    """Three agents, three rounds: each keeps its own history and reads the others' last answers."""
    topic = f"Question to debate: {text.sentence()}\nGive your position in a short paragraph."
    chains = [Chain(script, [user(topic)]) for _ in range(3)]
    said = [text.answer(400) for _ in chains]
    made = [chain.call(each, role="debater") for chain, each in zip(chains, said, strict=True)]
    for _ in range(2):
        new = [text.answer(400) for _ in chains]
        calls = []
        for number, chain in enumerate(chains):
            others = [other for other in range(3) if other != number]
            heard = "\n\n".join(f"One agent's response: ```{said[other]}```" for other in others)
            prompt = f"These are the answers of the others:\n\n{heard}\n\nUpdate yours."
            chain.hear(user(prompt), *(made[other] for other in others))
            calls.append(chain.call(new[number], role="debater"))
        made, said = calls, new


def chat(script: Script, text: Text) -> None:
    """A person's conversation."""
    chain = Chain(script, [system("You are a helpful assistant.")])
    for _ in range(text.draw.randint(2, 8)):
        chain.hear(user(text.prose(text.draw.choice((20, 80, 300)))))
        chain.call(text.answer(), pause_s=PERSON_S, role="chat")


def copilot(script: Script, text: Text) -> None:
    """One call behind a long system prompt that all instances share: no edge."""
    script.chat([system(_COPILOT), user(text.prose(120))], text.answer(300), role="copilot")


RECIPES: dict[str, Callable[[Script, Text], None]] = {
    recipe.__name__: recipe
    for recipe in (
        chain_summary,
        map_reduce,
        tree_summary,
        multi_agent,
        tool_agent,
        planned_agent,
        debate,
        chat,
        copilot,
    )
}


def applications(instances: int, seed: int, only: str | None = None) -> list[Script]:
    """That many sessions, the recipes in turn."""
    names = list(RECIPES) if only is None else [only]
    scripts = []
    for number in range(instances):
        name = names[number % len(names)]
        script = Script(f"{name}-{number}")
        RECIPES[name](script, Text(f"{seed} {script.session}"))
        scripts.append(script)
    return scripts
