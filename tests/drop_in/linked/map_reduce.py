"""LangChain: a chain for each part at once, and one for what they said."""

from __future__ import annotations

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

PARTS = [
    f"Chapter {number}. The {who} went down to the sea and counted {number * 7} ships."
    for number, who in enumerate(("heron", "fox", "duck", "miller"), 1)
]


def main() -> None:
    model = ChatOpenAI(model=os.environ["DROP_IN_MODEL"], max_tokens=100, temperature=1.0)
    one = ChatPromptTemplate.from_messages(
        [("system", "You summarise parts of a book."), ("user", "Summarise this part:\n\n{part}")]
    )
    whole = ChatPromptTemplate.from_template("Make one summary of these:\n\n{summaries}")
    summaries = (one | model | StrOutputParser()).batch([{"part": part} for part in PARTS])
    (whole | model | StrOutputParser()).invoke({"summaries": "\n\n".join(summaries)})


main()
