"""A model in this process, without a server.

    llm = LLM()                                   # the bundled demo model
    llm.generate("Once upon a time", SamplingParams(max_tokens=20))[0].outputs[0].text

    with llm.context() as story:
        story.fill("Once upon a time")
        endings = [story.fork().generate() for _ in range(3)]

Synchronous and not thread-safe: the engine runs while a call waits for it.
"""

from parrot_engine.llm.context import LLMContext
from parrot_engine.llm.llm import LLM, Progress
from parrot_engine.llm.request import Prompt, Request, RequestOutput

__all__ = ["LLM", "LLMContext", "Progress", "Prompt", "Request", "RequestOutput"]
