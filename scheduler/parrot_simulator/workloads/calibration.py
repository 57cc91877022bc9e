"""Single chat calls at a rate: figure 10, which looks for the capacity that keeps chats quick."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parrot_scheduler.task import LATENCY

from parrot_simulator.plan import ApplicationPlan, CallPlan, Segment
from parrot_simulator.workloads.base import Generator, chat_lengths, poisson


def chat(
    name: str, arrival_s: float, prompt_tokens: int, output_tokens: int, *, tenant: str = "chat"
) -> ApplicationPlan:
    """One call that shares nothing with any other, for somebody who waits."""
    call = CallPlan(
        index=0,
        prompt=(Segment(("own", name), prompt_tokens),),
        output_tokens=output_tokens,
        max_tokens=output_tokens,
        template="chat",
        objective=LATENCY,
    )
    return ApplicationPlan(
        id=name,
        arrival_s=arrival_s,
        calls=(call,),
        tenant=tenant,
        kind="chat",
        ttft_s=2.0,
        tpot_s=0.1,
    )


@dataclass(slots=True, kw_only=True)
class Calibration(Generator):
    """Figure 10: 100 ShareGPT prompts as a Poisson process of 5 to 25 a second.

    One A100, LLaMA 13B, engine capacity 2048 to 12288 tokens; the measure is time per output
    token. Lengths: see `chat_lengths`. A chat is on time with its first token within 2 s and then
    100 ms a token.
    """

    name: str = "calibration"
    rate: float = 25.0
    count: int = 100

    def arrivals(self) -> Iterator[ApplicationPlan]:
        """`count` calls."""
        random = self.random()
        times = poisson(random, self.rate)
        for number in range(self.count):
            prompt, output = chat_lengths(random)
            yield chat(f"chat-{number}", next(times), self.tokens(prompt), self.tokens(output))
