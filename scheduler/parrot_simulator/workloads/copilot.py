"""A chat assistant behind one long system prompt: figures 14 and 15."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from parrot_scheduler.task import LATENCY

from parrot_simulator.plan import ApplicationPlan, CallPlan, Segment
from parrot_simulator.workloads.base import Generator

SYSTEM_TOKENS = 5107
#: Recorded prompt lengths, system prompt included, as kept with Parrot's artifact.
PROMPTS = (
    *(6183, 6197, 6908, 6081, 5882, 5916, 5992, 6814, 6066, 6157, 6024, 6093, 6105, 6024, 6278),
    *(6015, 6334, 6018, 6169, 6296, 5941, 6089, 6009, 6032, 6074, 5923, 5859, 6139, 5959, 5915),
    *(6112, 6031, 6124, 6065, 6304, 6050, 6073, 5835, 6908, 6024, 7048, 5932, 5945, 6090, 5972),
    *(6163, 5973, 6158, 6404, 5857, 6364, 6203, 6150, 6036, 6694, 6038, 6414, 6000, 6154, 5999),
    *(6890, 7100, 6924, 6032, 5862, 6066, 5961, 6592, 6066, 6423, 6297, 6194, 6095, 6062, 5987),
    *(6439, 6810, 6043, 6096, 6107, 7311, 7381, 6293, 6276, 6416, 5262, 6213, 6109, 6289, 6412),
    *(6278, 6057, 6032, 6105, 5259, 6293, 5919, 6910, 5700, 5953, 6775, 5855, 5933, 5966, 6086),
    *(5985, 6129, 6401, 6076, 5953, 6180, 6350, 5598, 6028, 6228, 6400, 6239, 6396, 6050, 6378),
    *(5999, 6141, 6241, 6379, 6039, 6158, 6137, 6077, 6216, 6036, 6229, 6160, 5264, 6079, 5880),
    *(5972, 5966, 7083, 6178, 6734, 6394, 5861, 6081, 6687, 6183, 6049, 7004, 6071, 6247, 6962),
    *(6363, 6028, 5238, 5997, 6593, 6259, 6838, 6395, 6127, 6868, 6857, 6718, 6278, 6456, 7241),
    *(6300, 5240, 5950, 6283, 6169, 6097, 5224, 5972, 6627, 6822, 6153, 6652, 5908, 6039, 5271),
    *(7205, 6115, 6251, 6054, 6919, 6213, 6152, 6103, 5277, 6184, 6243, 6203, 7333, 5274, 6144),
    *(6244, 6163, 6073, 6150, 6298, 6327, 6101, 6136, 5906, 5265, 6221, 6261, 6110, 7127, 6132),
    *(5741, 5271, 6203, 6219, 6148, 6142, 6173, 6314, 6232, 6264, 7133, 6211, 6325, 5271, 6211),
    *(6131, 5952, 5258, 6250, 5276, 6158, 7361, 5279, 6726, 6749, 6188, 5300, 5769, 6153, 5294),
    *(6079, 6286, 5983, 6239, 6446, 5811, 7012, 6321, 6730, 5261, 6233, 6303, 6863, 6109, 7492),
    *(6448, 5990, 6104, 5270, 6192, 6028, 6358, 5289, 6344, 5310, 6164, 6217, 6254, 6203, 5281),
    *(6048, 7282, 5244, 6250, 5269, 6548, 5276, 5290, 6186, 5331, 5286, 6871, 6749, 5259, 5939),
    *(6827, 5278, 7159),
)
#: Figure 14: recorded output lengths, each with how many of the 64 prompts have it.
OUTPUTS = (
    *((183, 2), (191, 3), (192, 3), (192, 1), (195, 3), (196, 2), (209, 4), (212, 3), (232, 2)),
    *((232, 5), (248, 2), (251, 2), (256, 1), (269, 3), (303, 1), (313, 1), (351, 5), (360, 6)),
    *((393, 7), (619, 2), (800, 2), (800, 4)),
)


@dataclass(slots=True, kw_only=True)
class Copilot(Generator):
    """Figures 14 and 15: 5107 shared tokens in front of every prompt, `batch` slots in a loop.

    With `output_tokens` unset (figure 14) 64 of the 288 recorded prompts get the 64 recorded
    outputs (mean 331), at batch 8, 16, 32, 64; the shuffle is Python's, not numpy's as in the
    artifact. With `output_tokens` set (figure 15) all 288 prompts run: batch 32 with 200, 400,
    600, 800 tokens; batch 64 with 100, 200, 300, 400, 480. A slot takes the next prompt when its
    last one has ended. One A100, LLaMA 7B, no network in between.
    """

    name: str = "copilot"
    batch: int = 32
    output_tokens: int | None = None
    #: The artifact's own seed.
    seed: int = 2023

    #: Prompts that have been started.
    _started: int = field(default=0, init=False, repr=False)

    def arrivals(self) -> Iterator[ApplicationPlan]:
        """One plan for each slot."""
        self._started = min(self.batch, self._count)
        for number in range(self._started):
            yield self._plan(number, 0.0)

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        """The next prompt, for the slot that has become free."""
        if self._started >= self._count:
            return None
        self._started += 1
        return self._plan(self._started - 1, now)

    @property
    def _count(self) -> int:
        return 64 if self.output_tokens is None else len(PROMPTS)

    def _plan(self, number: int, arrival_s: float) -> ApplicationPlan:
        prompts = list(PROMPTS)
        outputs = [length for length, count in OUTPUTS for _ in range(count)]
        random = self.random()
        if self.output_tokens is None:
            random.shuffle(prompts)
            random.shuffle(outputs)
        output = self.tokens(self.output_tokens or outputs[number])
        own = prompts[number] - SYSTEM_TOKENS
        call = CallPlan(
            index=0,
            prompt=(
                Segment("system", self.tokens(SYSTEM_TOKENS)),
                Segment(("own", number), self.tokens(own)),
            ),
            output_tokens=output,
            max_tokens=output,
            template="copilot",
            objective=LATENCY,
        )
        return ApplicationPlan(
            id=f"user-{number}", arrival_s=arrival_s, calls=(call,), kind="copilot"
        )
