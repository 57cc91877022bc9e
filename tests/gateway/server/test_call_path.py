"""What the architecture says of the files that a chat call enters."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import serving

from parrot_gateway.settings.model import SchedulerSettings

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"
BODY = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_files_that_a_chat_call_enters(stream: bool, explain: bool) -> None:
    said = re.search(
        r"chat call to an own model enters (\d+) files.*?(\d+) more where calls are explained",
        " ".join(ARCHITECTURE.read_text().split()),
    )
    assert said is not None
    expected = int(said[1]) + (int(said[2]) if explain else 0)
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        # Bodies of modules run once, when something is imported.
        if event == "call" and "/parrot_gateway/" in path and frame.f_code.co_name != "<module>":
            entered.add(path.rpartition("/parrot_gateway/")[2])

    scheduler = SchedulerSettings(explain_calls=explain)
    async with serving(ScriptedRemoteEngine(), scheduler=scheduler) as service:
        body = {**BODY, "stream": stream}
        # What is made or remembered on first use is there for the second.
        assert (await service.post("/v1/chat/completions", body))[0] == 200
        sys.setprofile(note)
        try:
            assert (await service.post("/v1/chat/completions", body))[0] == 200
        finally:
            sys.setprofile(None)
    assert len(entered) == expected, sorted(entered)
