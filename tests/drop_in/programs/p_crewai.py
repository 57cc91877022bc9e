"""crewAI: a crew of one with a tool, and a task with a pydantic output."""

# /// script
# requires-python = ">=3.11"
# dependencies = ["crewai>=1.15"]
# ///

from __future__ import annotations

import os

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("OTEL_SDK_DISABLED", "true")

from common import BASE_URL, MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from weather import Weather


def main() -> None:
    llm = LLM(model=f"openai/{MODEL}", base_url=BASE_URL, api_key="none")
    text = ""
    if not ONLY_STRUCTURED:
        look_up = tool("get_weather")(get_weather)
        agent = Agent(role="a", goal="answer", backstory="b", llm=llm, tools=[look_up])
        task = Task(description=QUESTION, expected_output="a sentence", agent=agent)
        text = Crew(agents=[agent], tasks=[task]).kickoff().raw
    form = llm.call([{"role": "user", "content": QUESTION}], response_model=Weather)
    report("crewai", text, Weather.model_validate_json(form) if isinstance(form, str) else form)


main()
