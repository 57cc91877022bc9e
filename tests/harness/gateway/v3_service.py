"""The model behind a scripted gateway, and what its clients leave behind."""

from __future__ import annotations

from typing import Any

from parrot_engine.protocol import Failed, Generate, SamplingParams

from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service
from harness.waiting import until


class Model:
    """Answers a prompt with what is behind its last `say:`, in brackets; remembers prompts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.engine = ScriptedRemoteEngine(self.script, max_context_tokens=4096, tokens_per_step=64)

    def script(self, prompt: list[int], sampling: SamplingParams) -> list[int | Failed]:
        text = self.engine.tokenizer.decode(prompt)
        self.prompts.append(text)
        if "BREAK" in text:
            return [Failed(0, "engine_error", "it broke")]
        return [*self.engine.text(f"[{text.rpartition('say:')[2]}]")]

    @property
    def samplings(self) -> list[SamplingParams]:
        """Return the sampling of all generations until now."""
        return [item.sampling for item in self.engine.submitted if isinstance(item, Generate)]


def left_over(service: Service) -> dict[str, Any]:
    """Return the gauges that are not back to zero."""
    described = service.gateway.semantic.describe()
    counts = {
        "gate": service.gate.running,
        "readers": described["readers"],
        **{name: described["sessions"][name] for name in ("sessions", "variables", "value_bytes")},
        **{
            name: described["calls"][name]
            for name in ("waiting", "in_line", "running", "held_bytes", "tasks")
        },
    }
    return {name: count for name, count in counts.items() if count}


async def blocked(service: Service, readers: int = 1) -> None:
    """Wait until exactly `readers` clients wait for a variable."""
    await until(lambda: service.gateway.semantic.describe()["readers"] == readers)
