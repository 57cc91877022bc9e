"""Tree summary: LlamaIndex summarises pages of the book, then the summaries, as a tree.

    python examples/llamaindex_tree_summary.py [--compare]

The query engine is unchanged. By default it summarises page after page; with `use_async` all pages
of a level at the same time. With `defer=True` it submits the whole tree before the first summary
is written, and one line waits for the answer: one more round trip, since levels still follow one
another, but none of them waits for the model.
"""

from __future__ import annotations

from typing import Any

from comparison import Result, Setting, book, main
from llama_index.core import Document, PromptTemplate, SummaryIndex
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMCompletionStartEvent
from llama_index.llms.parrot import Parrot
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.event_handlers import BaseEventHandler


class Calls(BaseEventHandler):
    """Counts the calls of models that LlamaIndex makes."""

    count: int = 0

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Take note of an event."""
        self.count += isinstance(event, LLMCompletionStartEvent)


CALLS = Calls()
get_dispatcher().add_event_handler(CALLS)


def summarise(setting: Setting, *, side_by_side: bool, knows_graph: bool) -> Result:
    """An ordinary query engine, and one line that waits for its answer."""
    llm = Parrot(
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
        llm=llm,
        response_mode="tree_summarize",
        summary_template=question,
        use_async=side_by_side,
    )
    before = CALLS.count
    response = engine.query("What happens to Alice?")
    return Result([str(llm.resolve(response)).strip()], calls=CALLS.count - before)


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
