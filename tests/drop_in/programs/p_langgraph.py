"""LangGraph: `create_react_agent` on `ChatOpenAI` with Responses on, and structured output."""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "langchain-openai>=1.7",
#   "langgraph>=1.2",
# ]
# ///

from __future__ import annotations

from common import MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from weather import Weather


def main() -> None:
    model = ChatOpenAI(model=MODEL, use_responses_api=True)
    text = ""
    if not ONLY_STRUCTURED:
        agent = create_react_agent(model, [get_weather])
        answer = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
        text = answer["messages"][-1].text
    form = model.with_structured_output(Weather).invoke(QUESTION)
    report("langgraph", text, form)


main()
