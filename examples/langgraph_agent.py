"""An agent with tools: plan, look up, count, answer, and a title for the answer (LangGraph).

    python examples/langgraph_agent.py [--compare]

The tools are real and read the bundled book. A tool runs in the client, so its call has to come
back: that is a round trip with or without the gateway's knowledge. A text that only another call
reads has not. So the graph puts the plan beside the first tool call that reads it, and the answer
beside its title: two round trips less. `tool_choice` makes a model call a tool, even one as small
as the demo model, whose arguments a grammar keeps to the tool's schema.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypedDict

from comparison import Result, Setting, book, main
from langchain_core.tools import BaseTool, tool
from langchain_parrot import ChatParrot, submit
from langgraph.graph import END, START, StateGraph

Word = Literal["Alice", "Rabbit", "Queen", "Hatter", "Cat", "Turtle", "Duchess"]


@tool
def look_up(word: Word) -> str:
    """A sentence of the book in which the word stands."""
    return next(sentence for sentence in book.text().split(". ") if word in sentence)[:300]


@tool
def count(word: Word) -> str:
    """How often the word stands in the book."""
    return f"{word} stands there {book.text().count(word)} times."


class State(TypedDict):
    """The texts that nodes have written, by their names."""

    texts: Annotated[dict[str, str], operator.or_]


class Agent:
    """The graph.

    Args:
        setting: where and how.
        knows_graph: nodes whose texts only go to other nodes run beside their readers.
    """

    def __init__(self, setting: Setting, *, knows_graph: bool) -> None:
        self.salt, self.session = setting.salt, setting.session
        self.knows_graph = knows_graph
        self.model = ChatParrot(
            model=setting.model,
            base_url=setting.base_url,
            max_tokens=128,
            seed=7,
            linking=knows_graph,
        )
        graph = StateGraph(State)
        question = "Question: who is the strangest in the book?"
        plan = f"{question}\nThe plan: {{plan}}"
        found = f"{plan}\nFound: {{look_up}}\nCounted: {{count}}"
        nodes: dict[str, Any] = {
            "plan": self.text("plan", f"{question}\nMake a plan."),
            "look_up": self.call(look_up, f"{plan}\nLook up somebody.", "plan"),
            "count": self.call(count, f"{plan}\nFound: {{look_up}}\nCount a word.", "plan"),
            "answer": self.text("answer", f"{found}\nAnswer.", "plan"),
            "title": self.text("title", "Give this a title: {answer}", "answer", is_final=True),
        }
        stages = [["plan", "look_up"], ["count"], ["answer", "title"]]
        if not knows_graph:
            stages = [[name] for stage in stages for name in stage]
        before = [START]
        for stage in stages:
            for name in stage:
                graph.add_node(name, nodes[name])
                graph.add_edge(before if len(before) > 1 else before[0], name)
            before = stage
        for name in before:
            graph.add_edge(name, END)
        self.graph = graph.compile()

    def ask(self, state: State, prompt: str, reads: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
        """A prompt with what is known put in, and what the gateway is to put in."""
        texts = dict(state["texts"])
        fields: dict[str, Any] = {}
        if self.knows_graph:
            texts.update({name: "{{" + name + "}}" for name in reads})
            fields = {"session": self.session, "inputs": {name: name for name in reads}}
        return f"{self.salt}\n{prompt.format_map(texts)}", fields

    def text(
        self, name: str, prompt: str, *reads: str, is_final: bool = False
    ) -> Callable[[State], Any]:
        """A node that writes a text; where only other nodes read it, it stays in the gateway."""
        writer = self.model.bind(max_tokens=16, ignore_eos=True)

        def node(state: State) -> dict[str, dict[str, str]]:
            asked, fields = self.ask(state, prompt, reads)
            if self.knows_graph and not is_final:
                submit(writer, asked, output=name, **fields)
                return {"texts": {}}
            answer = writer.invoke(asked, **fields)
            return {"texts": {name: str(answer.content)}}

        return node

    def call(self, used: BaseTool, prompt: str, *reads: str) -> Callable[[State], Any]:
        """A node that has the model call a tool, and runs it."""
        model = self.model.bind_tools([used], tool_choice=used.name, strict=True)

        def node(state: State) -> dict[str, dict[str, str]]:
            asked, fields = self.ask(state, prompt, reads)
            answer = model.invoke(asked, **fields)
            return {"texts": {used.name: used.invoke(answer.tool_calls[0]["args"])}}

        return node

    def run(self) -> Result:
        """Plan, tools, answer, title."""
        texts = self.graph.invoke({"texts": {}})["texts"]
        shown = [texts[name] for name in ("look_up", "count", "title")]
        return Result(shown, calls=5)


if __name__ == "__main__":
    main(
        __doc__,
        {
            "step by step": lambda setting: Agent(setting, knows_graph=False).run(),
            "with its graph": lambda setting: Agent(setting, knows_graph=True).run(),
        },
    )
