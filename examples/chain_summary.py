"""Chain summary: a book's summary, refined chapter part by chapter part (LangChain).

    python examples/chain_summary.py [--compare]

Three ways of the same chain. Call by call, the client waits for each summary and sends it back in
the next prompt. Deferred, the same loop submits its calls: the client runs ahead of the model. All
at once, the steps name what they write and read, and go out in one round trip.
"""

from __future__ import annotations

from typing import Any

from comparison import Result, Setting, book, main
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel
from langchain_parrot import ChatParrot, submit

FIRST = ChatPromptTemplate.from_template(
    "{salt}\nSummarise a book in one sentence, part by part.\nThe first part:\n{part}\nThe summary:"
)
NEXT = ChatPromptTemplate.from_template(
    "{salt}\nSummarise a book in one sentence, part by part.\nThe summary of the parts before: "
    "{summary}\nRefine it with the next part:\n{part}\nThe refined summary:"
)


def model(setting: Setting, *, knows_graph: bool) -> ChatParrot:
    """The model; without linking and fields of Parrot it is an ordinary one."""
    return ChatParrot(
        model=setting.model,
        base_url=setting.base_url,
        max_tokens=16,
        seed=7,
        extra_body={"ignore_eos": True},
        linking=knows_graph,
    )


def parts(setting: Setting) -> list[str]:
    """The text to summarise."""
    return book.chunks(3, 300) if setting.quick else book.chunks(6, 500)


def loop(setting: Setting, *, defer: bool) -> Result:
    """The chain as one writes it: a loop. Submitting its calls is what makes it run ahead."""
    session = {"session": setting.session} if defer else {}
    llm = model(setting, knows_graph=defer).bind(**session)
    begin = FIRST | llm | StrOutputParser()
    refine = NEXT | llm | StrOutputParser()

    def run(chain: Runnable[dict[str, Any], str], given: dict[str, Any]) -> Any:
        return submit(chain, given) if defer else chain.invoke(given)

    first, *others = parts(setting)
    summary = run(begin, {"salt": setting.salt, "part": first})
    for part in others:
        summary = run(refine, {"salt": setting.salt, "part": part, "summary": summary})
    # Reading a submitted text is what waits for it.
    return Result([str(summary)], calls=1 + len(others))


def at_once(setting: Setting) -> Result:
    """All steps together: each says which variable it writes and which it reads."""
    # Names of variables are of a session.
    llm = model(setting, knows_graph=True).bind(session=setting.session)
    first, *others = parts(setting)
    steps: dict[str, Runnable[dict[str, str], str]] = {
        "summary_0": FIRST.partial(part=first) | llm.bind(output="summary_0") | StrOutputParser()
    }
    for number, part in enumerate(others, start=1):
        output = f"summary_{number}"
        reads = {"summary": f"summary_{number - 1}"}
        steps[output] = (
            NEXT.partial(part=part) | llm.bind(output=output, inputs=reads) | StrOutputParser()
        )
    chain = RunnableParallel(steps)
    texts = chain.invoke({"salt": setting.salt, "summary": "{{summary}}"})
    return Result([texts[output]], calls=len(steps))


if __name__ == "__main__":
    main(
        __doc__,
        {
            "call by call": lambda setting: loop(setting, defer=False),
            "deferred": lambda setting: loop(setting, defer=True),
            "at once": at_once,
        },
    )
