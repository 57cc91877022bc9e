"""DSPy: a ReAct program and typed outputs."""

# /// script
# requires-python = ">=3.11"
# dependencies = ["dspy>=3.4"]
# ///

from __future__ import annotations

import dspy
from common import BASE_URL, MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from dspy.lm15 import (
    AccessPolicy,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
    register_provider,
)
from weather import Weather


class Ask(dspy.Signature):
    """Answer the question."""

    question: str = dspy.InputField()
    weather: Weather = dspy.OutputField()


def main() -> None:
    text = ""
    if not ONLY_STRUCTURED:
        lm = dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key="none", cache=False)
        dspy.configure(lm=lm)
        text = dspy.ReAct("question -> answer", tools=[get_weather])(question=QUESTION).answer
    # Of models that it has not heard of DSPy has to be told that they take schemas.
    access = AccessPolicy("gateway", base_url=BASE_URL)
    register_provider(
        ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("openai")),
        supports=ModelSupport(response_schema=True),
    )
    lm = dspy.LM(f"gateway/{MODEL}", api_key="none", cache=False)
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
    report("dspy", text, dspy.Predict(Ask)(question=QUESTION).weather)


main()
