"""The architecture page names the files that a decode step enters."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.engine.driver import EngineDriver
from parrot_engine.protocol import Event, Fill, Generate, Generated, SamplingParams
from parrot_engine.settings import BuiltinSettings

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"
#: Tokens after which steps are traced, and no longer; none of them fills a block.
FIRST, LAST, MAX_TOKENS = 4, 8, 12
PROMPT = list(range(5, 10))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_files_that_a_decode_step_enters(overlap: str, temperature: float, tmp_path: Path) -> None:
    said = re.search(
        r"decode step enters (\d+) files of the engine", " ".join(ARCHITECTURE.read_text().split())
    )
    assert said is not None
    entered: set[str] = set()
    is_tracing, has_ended = threading.Event(), threading.Event()
    tokens = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        _, found, file = frame.f_code.co_filename.rpartition("/parrot_engine/")
        if found and event == "call" and is_tracing.is_set():
            entered.add(file)

    def count(events: list[Event]) -> None:
        nonlocal tokens
        tokens += sum(len(each.token_ids) for each in events if isinstance(each, Generated))
        (is_tracing.set if FIRST <= tokens < LAST else is_tracing.clear)()
        if tokens == MAX_TOKENS:
            has_ended.set()

    folder = make_checkpoint(tmp_path, CONFIGS["llama"])
    values = BuiltinSettings(device="cpu", num_blocks=50, block_size=32, overlap=overlap)
    driver = EngineDriver(BuiltinEngine.load(folder, values, model="tiny"))
    driver.attach(count)
    threading.setprofile(note)
    driver.start()
    try:
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, ignore_eos=True)
        driver.submit([Fill(1, PROMPT), Generate(1, params)])
        assert has_ended.wait(30)
    finally:
        threading.setprofile(None)
        driver.close()
    assert len(entered) == int(said[1]), sorted(entered)
