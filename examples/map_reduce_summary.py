"""Map-reduce summary: parts of a book summarised side by side, then together (LangChain).

    python examples/map_reduce_summary.py [--compare]

Three ways of the same application. Call by call, `.batch` brings all summaries to the client,
which sends them back in the last prompt. Deferred, it carries references instead, and the gateway
knows at once what the parts are for. All at once, the last call names the variables that it reads
and goes out together with the parts.
"""

from __future__ import annotations

from comparison import Result, Setting, book, main
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel
from langchain_parrot import ChatParrot, JoinTexts

MAP = ChatPromptTemplate.from_template(
    "{salt}\nSummarise this part of a book in one sentence:\n{part}\nThe summary:"
)
REDUCE = ChatPromptTemplate.from_template(
    "{salt}\nMake one summary of these summaries:\n- {summaries}\nThe summary of all:"
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
    return book.chunks(3, 300) if setting.quick else book.chunks(5, 500)


def batch(setting: Setting, *, defer: bool) -> Result:
    """Summarise as people write it: a chain, a batch and a last call; only `defer` differs."""
    llm = model(setting, knows_graph=defer).bind(defer=defer)
    summarise = MAP | llm | StrOutputParser()
    texts = {"salt": lambda _: setting.salt, "summaries": JoinTexts(separator="\n- ")}
    chain = summarise.map() | texts | REDUCE | llm | StrOutputParser()
    inputs = [{"salt": setting.salt, "part": part} for part in parts(setting)]
    return Result([chain.invoke(inputs)], calls=len(inputs) + 1)


def at_once(setting: Setting) -> Result:
    """All calls together: those of the parts name what they write, the last one what it reads."""
    # Names of variables are of a session.
    llm = model(setting, knows_graph=True).bind(session=setting.session)
    maps: dict[str, Runnable[dict[str, str], str]] = {
        f"summary_{number}": MAP.partial(part=part)
        | llm.bind(output=f"summary_{number}")
        | StrOutputParser()
        for number, part in enumerate(parts(setting))
    }
    reduce = REDUCE | llm.bind(inputs={name: name for name in maps}) | StrOutputParser()
    lines = "\n- ".join(f"{{{{{name}}}}}" for name in maps)
    chain = RunnableParallel({**maps, "all": reduce})
    texts = chain.invoke({"salt": setting.salt, "summaries": lines})
    return Result([texts["all"]], calls=len(maps) + 1)


if __name__ == "__main__":
    main(
        __doc__,
        {
            "call by call": lambda setting: batch(setting, defer=False),
            "deferred": lambda setting: batch(setting, defer=True),
            "at once": at_once,
        },
    )
