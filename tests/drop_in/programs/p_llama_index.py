"""LlamaIndex: a function agent and a structured prediction, over its class for such servers."""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "llama-index-core>=0.14.25",
#   "llama-index-llms-openai-like>=0.8.1",
# ]
# ///

from __future__ import annotations

import asyncio

from common import BASE_URL, MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from weather import Weather


async def main() -> None:
    llm = OpenAILike(
        model=MODEL,
        api_base=BASE_URL,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
    )
    text = ""
    if not ONLY_STRUCTURED:
        text = str(await FunctionAgent(tools=[get_weather], llm=llm).run(QUESTION))
    form = await llm.astructured_predict(Weather, PromptTemplate(QUESTION))
    report("llama-index-core", text, form)


asyncio.run(main())
