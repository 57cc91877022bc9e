"""Tree summary: LlamaIndex summarises pages of the book, then the summaries, as a tree.

    python examples/llamaindex_tree_summary.py [--compare]

The query engine is unchanged. By default it summarises page after page; with `use_async` all pages
of a level at the same time. With `defer=True` it submits the whole tree before the first summary
is written, and waits for the root: one more round trip, since levels still follow one another, but
none of them waits for the model.
"""

from __future__ import annotations

from typing import Any

from comparison import Result, Setting, book, main
from llama_index.core import Document, PromptTemplate, SummaryIndex
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.llms.parrot import Parrot


class CountedParrot(Parrot):
    """Counts its calls. An event handler could too, but who follows a program is shown texts."""

    _count: int = PrivateAttr(default=0)

    @property
    def count(self) -> int:
        """Calls so far."""
        return self._count

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text, and count it."""
        self._count += 1
        answer: CompletionResponse = super().complete(prompt, formatted, **kwargs)
        return answer

    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Complete a text, and count it."""
        self._count += 1
        answer: CompletionResponse = await super().acomplete(prompt, formatted, **kwargs)
        return answer


def summarise(setting: Setting, *, side_by_side: bool, knows_graph: bool) -> Result:
    """An ordinary query engine."""
    llm = CountedParrot(
        model=setting.model,
        base_url=setting.base_url,
        api_key=setting.api_key,
        max_tokens=16,
        # As small as this, so that a few pages make a tree.
        context_window=512,
        is_chat_model=False,
        additional_kwargs={"seed": 7, "ignore_eos": True},
        defer=knows_graph,
        # LlamaIndex strips summaries before it puts them together; of a reference, only the
        # gateway can.
        transform="strip" if knows_graph else None,
        linking=knows_graph,
    )
    question = PromptTemplate(
        setting.salt + "\nOf a book:\n{context_str}\nThe question: {query_str}\nThe answer:"
    )
    pages = Document(text=book.passage(2500 if setting.quick else 5000))
    engine = SummaryIndex.from_documents([pages]).as_query_engine(
        llm=llm, response_mode="tree_summarize", summary_template=question, use_async=side_by_side
    )
    response = engine.query("What happens to Alice?")
    return Result([str(response).strip()], calls=llm.count)


if __name__ == "__main__":
    main(
        __doc__,
        {
            "page by page": lambda setting: summarise(
                setting, side_by_side=False, knows_graph=False
            ),
            "side by side": lambda setting: summarise(
                setting, side_by_side=True, knows_graph=False
            ),
            "deferred": lambda setting: summarise(setting, side_by_side=True, knows_graph=True),
        },
    )
