"""DSPy: a ReAct program and typed outputs."""

from __future__ import annotations

import dspy
from common import BASE_URL, MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from weather import Weather


class Ask(dspy.Signature):
    """Answer the question."""

    question: str = dspy.InputField()
    weather: Weather = dspy.OutputField()


def main() -> None:
    lm = dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key="none", cache=False)
    dspy.configure(lm=lm)
    text = ""
    if not ONLY_STRUCTURED:
        text = dspy.ReAct("question -> answer", tools=[get_weather])(question=QUESTION).answer
    dspy.configure(adapter=dspy.JSONAdapter())
    report("dspy", text, dspy.Predict(Ask)(question=QUESTION).weather)


main()
