"""Multi-agent coding: an architect, and for each file a coder, a reviewer and a reviser (`openai`).

    python examples/multi_agent_coding.py [--compare]

The agents of a round work side by side, and each round reads the one before: four rounds of waiting
for a client that carries the texts. With semantic variables all agents are submitted together,
each naming what it writes and what it reads, and only the revised files come back.
"""

from __future__ import annotations

import asyncio
from typing import Any

from comparison import Result, Setting, book, main
from openai import AsyncOpenAI


class Team:
    """Agents that read what others write.

    Args:
        setting: where and how.
        knows_graph: the gateway is told who reads what; else the client waits and fills in.
    """

    def __init__(self, setting: Setting, *, knows_graph: bool) -> None:
        self.client = AsyncOpenAI(base_url=setting.base_url, api_key=setting.api_key)
        self.setting = setting
        self.knows_graph = knows_graph
        self.agents: dict[str, asyncio.Task[str]] = {}

    def add(self, name: str, prompt: str, *reads: str, tokens: int, is_final: bool = False) -> str:
        """An agent; `{{other}}` in its prompt is what that agent writes, one of `reads`."""
        work = self._work(name, prompt, reads, tokens, is_final)
        self.agents[name] = asyncio.create_task(work)
        return name

    async def _work(
        self, name: str, prompt: str, reads: tuple[str, ...], tokens: int, is_final: bool
    ) -> str:
        body: dict[str, Any] = {"ignore_eos": True}
        if self.knows_graph:
            inputs = {read: read for read in reads}
            body["parrot"] = {"session": self.setting.session, "output": name, "inputs": inputs}
            # What only other agents read stays in the gateway.
            body["parrot"]["defer"] = not is_final
        else:
            for read in reads:
                prompt = prompt.replace("{{" + read + "}}", await self.agents[read])
        answer = await self.client.chat.completions.create(
            model=self.setting.model,
            messages=[{"role": "user", "content": f"{self.setting.salt}\n{prompt}"}],
            max_tokens=tokens,
            seed=len(name),
            extra_body=body,
        )
        return answer.choices[0].message.content or ""


async def code(setting: Setting, *, knows_graph: bool) -> Result:
    """One project."""
    files = range(2 if setting.quick else 3)
    team = Team(setting, knows_graph=knows_graph)
    design = team.add("design", f"Design a program.\n{book.passage(300)}\nThe design:", tokens=24)
    guide = f"{book.passage(500, start=4000)}\nThe design: {{{{{design}}}}}"
    coders = [team.add(f"code_{n}", f"{guide}\nWrite file {n}:", design, tokens=24) for n in files]
    project = "".join(f"\nFile {n}:\n{{{{{coder}}}}}" for n, coder in enumerate(coders))
    rules = f"{book.passage(300, start=16_000)}{project}"
    reviewers = [
        team.add(f"review_{n}", f"{rules}\nReview file {n}:", *coders, tokens=12) for n in files
    ]
    revisers = [
        team.add(
            f"revised_{n}",
            f"{rules}\nRevise file {n} after its review: {{{{{review}}}}}\nThe file:",
            *coders,
            review,
            tokens=24,
            is_final=True,
        )
        for n, review in enumerate(reviewers)
    ]
    async with team.client:
        await asyncio.gather(*team.agents.values())
        texts = [await team.agents[name] for name in revisers]
    return Result(texts, calls=len(team.agents))


if __name__ == "__main__":
    main(
        __doc__,
        {
            "round by round": lambda setting: asyncio.run(code(setting, knows_graph=False)),
            "at once": lambda setting: asyncio.run(code(setting, knows_graph=True)),
        },
    )
